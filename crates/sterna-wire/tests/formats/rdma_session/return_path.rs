//! The return path, on which the destination sends commands (`specs/rdma.md §3.4`).
//!
//! A QEMU destination is always one message ahead.

use super::qemu::{QemuCommander, QemuListener};
use fastrand::Rng;
use sterna_wire::rdma::MessageType;
use sterna_wire::rdma::session::{Commander, Heard, Listener};

/// Number of seeds for each pairing.
const SEEDS: u64 = 2_000;

enum Sender {
    Sterna(Commander),
    Qemu(QemuCommander),
}

enum Reader {
    Sterna(Listener),
    Qemu(QemuListener),
}

/// Sends `messages` in one direction and READYs in the other. With `forget`, a Sterna does not post its
/// receives.
fn run(seed: u64, sender: Sender, reader: Reader, forget: bool) -> Result<(), String> {
    let (mut rng, mut sender, mut reader) = (Rng::with_seed(seed), sender, reader);
    let (messages, mut sent, mut read) = (rng.u32(1..12), 0, 0);
    // Messages in transit, posted receives and arrived messages: first at the reader, then at the sender.
    let (mut files, mut at_reader, mut files_here) = (0, 0usize, 0);
    let (mut readies, mut at_sender, mut readies_here) = (0, 0usize, 0);
    // QEMU posts its first receive some time after connecting, and before its first message.
    let mut is_late = matches!(sender, Sender::Qemu(_));
    if let Sender::Sterna(commander) = &mut sender {
        at_sender += commander.starting();
    }
    let first = match &mut reader {
        Reader::Sterna(listener) => listener.starting(),
        Reader::Qemu(listener) => listener.starting(),
    };
    at_reader += if forget { 1 } else { first };
    for _ in 0..2_000 {
        match rng.u32(0..7) {
            0 if sent < messages => {
                let receives = match &mut sender {
                    Sender::Sterna(commander) if commander.may_send() => {
                        commander.send(MessageType::File).map_err(|error| error.to_string())?.receives
                    }
                    Sender::Qemu(commander) if commander.may_send() => commander.send(MessageType::File),
                    _ => continue,
                };
                at_sender += receives + usize::from(std::mem::take(&mut is_late));
                sent += 1;
                files += 1;
            }
            6 if is_late => {
                is_late = false;
                at_sender += 1;
            }
            1 if files > 0 => {
                files -= 1;
                at_reader = at_reader.checked_sub(1).ok_or("no receive is posted for FILE")?;
                files_here += 1;
            }
            2 if readies > 0 => {
                readies -= 1;
                at_sender = at_sender.checked_sub(1).ok_or("no receive is posted for READY")?;
                readies_here += 1;
            }
            3 if readies_here > 0 => {
                readies_here -= 1;
                match &mut sender {
                    Sender::Sterna(commander) => match commander.received(MessageType::Ready) {
                        Ok(Heard::Ready) => {}
                        other => return Err(format!("{other:?}")),
                    },
                    Sender::Qemu(commander) => commander.received(MessageType::Ready)?,
                }
            }
            4 if files_here > 0 => {
                files_here -= 1;
                read += 1;
                match &mut reader {
                    Reader::Sterna(listener) => {
                        listener.received(MessageType::File).map_err(|error| error.to_string())?;
                    }
                    Reader::Qemu(listener) => listener.received(MessageType::File)?,
                }
            }
            5 if read < messages => {
                let receives = match &mut reader {
                    Reader::Sterna(listener) if listener.may_invite() => {
                        listener.invite().map_err(|error| error.to_string())?.receives
                    }
                    Reader::Qemu(listener) if listener.may_invite() => listener.invite(),
                    _ => continue,
                };
                at_reader += if forget { 0 } else { receives };
                readies += 1;
            }
            _ => {}
        }
        if read == messages {
            return Ok(());
        }
    }
    Err(format!("stuck: {read} of {messages} messages have been read"))
}

#[test]
fn return_path_brings_every_message_to_a_sterna_and_from_one() {
    let first = sterna_testing::seed("rdma_return_path");
    for seed in (0..SEEDS).map(|index| first.wrapping_add(index)) {
        let of_sterna = Reader::Sterna(Listener::of_return_path());
        let of_qemu = Reader::Sterna(Listener::of_qemus_return_path());
        for (what, outcome) in [
            ("Sternas", run(seed, Sender::Sterna(Commander::new()), of_sterna, false)),
            ("from a QEMU", run(seed, Sender::Qemu(QemuCommander::of_return_path()), of_qemu, false)),
            (
                "to a QEMU",
                run(seed, Sender::Sterna(Commander::new()), Reader::Qemu(QemuListener::default()), false),
            ),
        ] {
            outcome.unwrap_or_else(|why| panic!("{what}, STERNA_SEED={seed}: {why}"));
        }
    }
}

#[test]
fn return_path_with_too_few_receives_breaks_with_a_qemu() {
    let first = sterna_testing::seed("rdma_return_path_planted");
    let broken = (0..100).filter(|index| {
        let sender = Sender::Qemu(QemuCommander::of_return_path());
        run(first.wrapping_add(*index), sender, Reader::Sterna(Listener::of_qemus_return_path()), true)
            .is_err()
    });

    assert!(broken.count() > 50);
}

#[test]
fn ready_before_the_first_message_of_a_qemu_may_find_no_receive() {
    let first = sterna_testing::seed("rdma_return_path_early");
    let broken = (0..100).filter(|index| {
        let sender = Sender::Qemu(QemuCommander::of_return_path());
        let reader = Reader::Sterna(Listener::of_return_path());
        run(first.wrapping_add(*index), sender, reader, false)
            .is_err_and(|why| why.contains("no receive is posted for READY"))
    });

    assert!(broken.count() > 5);
    let mut listener = Listener::of_qemus_return_path();
    assert_eq!(listener.starting(), 4);
    assert!(!listener.may_invite() && listener.invite().is_err());
    listener.received(MessageType::File).unwrap();
    assert!(listener.may_invite() && listener.invite().is_ok());
    assert!(!listener.may_invite());
}

#[test]
fn return_path_as_a_main_connection_takes_no_message_ahead() {
    let mut listener = Listener::of_main();
    assert_eq!(listener.starting(), 2);
    let error = listener.received(MessageType::File).unwrap_err();
    assert!(error.to_string().contains("no READY was sent for it"), "{error}");

    let mut listener = Listener::of_return_path();
    assert_eq!(listener.starting(), 4);
    assert!(listener.received(MessageType::File).is_ok());
    let error = listener.received(MessageType::File).unwrap_err();
    assert_eq!(error.paragraph, "specs/rdma.md §3.4", "{error}");
}
