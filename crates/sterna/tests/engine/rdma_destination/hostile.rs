//! Sources that break rules, stop, fail or disappear: the error names the broken rule, and no resource is left.

use std::time::Duration;

use sterna::MigrationError;
use sterna_transport::rdma::double::{Fault, Settings, Trigger};
use sterna_transport::rdma::{CompletionStatus, RdmaError};
use sterna_transport::{ByteStream, StreamError};
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{MessageType, RegisterRequest, UnregisterRequest, ZeroRange};

use super::source::{Guest, Habits, Source, connect, empty, records};
use super::{LIMIT, Lab, MIB, small};
use crate::support::eventually;

/// Runs a source that misbehaves in a phase. Returns the destination's error.
fn refused(guest: &Guest, wrong: impl FnOnce(&mut Source<'_>) -> Result<(), StreamError>) -> String {
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    let mut source = Source::start(&lab, guest, Habits::qemu(1));
    source.begin(false).unwrap();
    // The source learns of its failure now, or with the next message.
    let _ = wrong(&mut source);
    let text = lab.assert_failed().to_string();
    drop(source);
    lab.assert_next_works(guest);
    lab.assert_empty();
    text
}

fn assert_says(text: &str, words: &[&str]) {
    assert!(words.iter().all(|word| text.contains(word)), "{words:?} are not in: {text}");
}

#[test]
fn commands_that_break_a_rule_name_message_field_and_rule() {
    let guest = Guest::new(&small());
    let low = guest.lengths()[0];
    let register = |key, block, more_chunks| {
        let request = RegisterRequest { key, block, more_chunks };
        refused(&guest, move |source| source.register(request).map(drop))
    };
    assert_says(&register(0, 2, 0), &["REGISTER_REQUEST, byte 24", "block 2, but there are 2", "§4.2"]);
    assert_says(&register(low, 0, 0), &["REGISTER_REQUEST, byte 16", "is not in the block"]);
    let zeros = |value, block, start, length| {
        let range = ZeroRange { value, block, start, length };
        refused(&guest, move |source| source.zeros(range))
    };
    assert_says(&zeros(1, 0, 0, 4096), &["COMPRESS, byte 16", "only 0 is known", "§4.4"]);
    assert_says(&zeros(0, 7, 0, 4096), &["COMPRESS, byte 20", "block 7"]);
    assert_says(&zeros(0, 0, low, 1), &["COMPRESS, byte 24", "is not in the block"]);
    assert_says(&zeros(0, 1, 4096, u64::MAX), &["COMPRESS, byte 32", "are not inside block 1"]);
    let unregister = |chunk, block| {
        let request = UnregisterRequest { chunk, block };
        let message = records(&[request]);
        refused(&guest, move |source| source.stream.main().send(&[&message], LIMIT).map_err(Into::into))
    };
    assert_says(&unregister(0, 0), &["UNREGISTER_REQUEST, byte 16", "is not registered", "§4.5"]);
    assert_says(&unregister(99, 1), &["UNREGISTER_REQUEST, byte 16", "chunk 99"]);
}

#[test]
fn messages_out_of_order_are_named() {
    let guest = Guest::new(&small());
    let unknown = [0, 99, 1, 0].map(u32::to_be_bytes).concat();
    let too_short = [48, 7, 2, 0].map(u32::to_be_bytes).concat();
    let mut file = Vec::new();
    sterna_wire::rdma::encode_file(b"stream", &mut file).unwrap();
    let cases: [(Vec<u8>, &[&str]); 7] = [
        (empty(MessageType::RamBlocksRequest), &["RAM_BLOCKS_REQUEST", "once, in the first phase"]),
        (empty(MessageType::Ready), &["READY", "receives commands"]),
        (file, &["FILE", "while a phase is open"]),
        (unknown, &["byte 4", "99"]),
        (too_short, &["byte 0"]),
        (vec![7; 5], &["5 bytes"]),
        (empty(MessageType::Error), &["it has failed (ERROR)"]),
    ];
    for (message, words) in cases {
        let text =
            refused(&guest, |source| source.stream.main().send(&[&message], LIMIT).map_err(Into::into));
        assert_says(&text, words);
    }
}

#[test]
fn first_phase_is_for_the_blocks() {
    let guest = Guest::new(&small());
    let register = records(&[RegisterRequest { key: 0, block: 0, more_chunks: 0 }]);
    for (message, words) in [
        (register, ["REGISTER_REQUEST", "begins with the exchange of blocks"]),
        (empty(MessageType::RegisterFinished), ["REGISTER_FINISHED", "begins with the exchange of blocks"]),
    ] {
        let lab = Lab::with(Settings::new(), &small(), |_| ());
        let (stream, ..) = connect(&lab, Habits::qemu(1)).unwrap();
        stream.begin_phase(&guest.to_first_hook(), LIMIT).unwrap();
        stream.main().send(&[&message], LIMIT).unwrap();

        assert_says(&lab.assert_failed().to_string(), &words);

        drop(stream);
        lab.assert_empty();
    }
}

#[test]
fn sterna_whose_handover_names_another_migration_is_refused() {
    let guest = Guest::new(&small()).with_return_path().with_handover([8; 16]);
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    let source = Source::try_start(&lab, &guest, Habits::sterna(1).with_return_path());

    assert_says(&lab.assert_failed().to_string(), &["handover", "another migration's id", "§2.3"]);

    drop(source);
    lab.assert_empty();
}

#[test]
fn write_outside_of_what_was_registered_ends_the_migration_and_writes_nothing() {
    let guest = Guest::new(&small());
    for is_key_0 in [true, false] {
        let lab = Lab::with(Settings::new(), &small(), |_| ());
        let source = Source::start(&lab, &guest, Habits::sterna(1));
        source.begin(false).unwrap();
        // A Sterna may write only memory that it has requested.
        let rkey = source.register(RegisterRequest { key: 0, block: 0, more_chunks: 0 }).unwrap();
        let (start, rkey) = if is_key_0 { (4096, 0) } else { (MIB - 4096, rkey) };
        source.write_with(source.range(0, start, 8192), rkey).unwrap();

        let failed = source.finish().unwrap_err();

        let StreamError::Rdma(RdmaError::Failed { status, .. }) = failed else { panic!("{failed}") };
        assert_eq!(status, CompletionStatus::RemoteAccess);
        source.stream.shutdown();
        lab.assert_failed();
        drop(source);
        lab.assert_next_works(&guest);
        lab.assert_empty();
    }
}

#[test]
fn source_that_falls_silent_in_a_phase_is_given_up() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |params| {
        params.limits.stall = Duration::from_millis(200);
    });
    let source = Source::start(&lab, &guest, Habits::qemu(1));
    source.begin(false).unwrap();

    assert_says(&lab.assert_failed().to_string(), &["no progress for 200ms"]);

    // The source is informed, as far as it still reads.
    let zeros = ZeroRange { value: 0, block: 0, start: 0, length: 4096 };
    // One more message is possible, because the source already had an invitation (READY).
    let heard = source.zeros(zeros).and_then(|()| source.zeros(zeros)).unwrap_err();
    assert_says(&heard.to_string(), &["ERROR"]);
    drop(source);
    lab.assert_empty();
}

/// The progress of a source before it disappears.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
enum Until {
    Connected,
    InFirstPhase,
    BetweenPhases,
    InPhase,
    Registered,
    Written,
    InLastPhase,
    AfterRam,
}

const EVERYWHERE: [Until; 8] = [
    Until::Connected,
    Until::InFirstPhase,
    Until::BetweenPhases,
    Until::InPhase,
    Until::Registered,
    Until::Written,
    Until::InLastPhase,
    Until::AfterRam,
];

/// Advances a source to that point.
fn advance(
    lab: &Lab,
    guest: &Guest,
    until: Until,
) -> Result<std::sync::Arc<sterna::rdma::SourceStream>, StreamError> {
    if until <= Until::InFirstPhase {
        let (stream, ..) = connect(lab, Habits::qemu(1))?;
        if until == Until::InFirstPhase {
            stream.begin_phase(&guest.to_first_hook(), LIMIT)?;
            stream.command(Command::RamBlocks, &empty(MessageType::RamBlocksRequest), LIMIT)?;
        }
        return Ok(std::sync::Arc::new(stream));
    }
    let mut source = Source::start(lab, guest, Habits::qemu(1));
    if until >= Until::InPhase {
        source.begin(false)?;
    }
    if until >= Until::Registered {
        source.write(source.range(0, 0, 8192))?;
    }
    if until >= Until::Written {
        source.send_block(0)?;
        source.send_block(1)?;
    }
    if until >= Until::InLastPhase {
        source.finish()?;
        source.begin(true)?;
    }
    if until >= Until::AfterRam {
        source.finish()?;
        super::source::write_all(&source.stream, &guest.to_end()[..20])?;
    }
    Ok(source.stream)
}

#[test]
fn source_that_goes_or_dies_anywhere_leaves_nothing_and_the_next_one_arrives() {
    let guest = Guest::new(&small());
    for until in EVERYWHERE {
        for dies in [false, true] {
            let lab = Lab::with(Settings::seeded(5), &small(), |_| ());
            let stream = advance(&lab, &guest, until).unwrap();

            if dies {
                lab.network.kill(&lab.source)
            } else {
                stream.shutdown()
            }
            drop(stream);

            // Before that no migration has begun, and the destination waits for the next source.
            if !matches!(until, Until::Connected) {
                let error = lab.assert_failed();
                assert!(!matches!(error, MigrationError::Internal(_)), "{until:?}: {error}");
            }
            if !dies {
                lab.assert_next_works(&guest);
            }
            lab.assert_empty();
        }
    }
}

#[test]
fn destination_that_is_given_up_anywhere_leaves_nothing() {
    let guest = Guest::new(&small());
    for until in EVERYWHERE {
        for drops in [false, true] {
            let lab = Lab::with(Settings::seeded(6), &small(), |_| ());
            let stream = advance(&lab, &guest, until).unwrap();

            if drops {
                let (network, destination) = (lab.network.clone(), lab.destination.clone());
                drop(lab);
                eventually("the destination's end", || {
                    let counts = network.counts_of(&destination);
                    (counts.queue_pairs, counts.registrations, counts.listeners) == (0, 0, 0)
                });
                drop(stream);
            } else {
                lab.incoming().cancel().unwrap();
                assert_says(&lab.assert_failed().to_string(), &["cancelled"]);
                drop(stream);
                lab.assert_next_works(&guest);
                lab.assert_empty();
            }
        }
    }
}

#[test]
fn adapter_that_fails_anywhere_at_the_destination_is_no_fault_of_the_source() {
    let guest = Guest::new(&small());
    // Requests of the destination: READYs and answers.
    for request in [1, 2, 3, 5, 8, 13] {
        let lab = Lab::with(Settings::new(), &small(), |_| ());
        lab.network.plan(&lab.destination, Trigger::Request(request), Fault::Errno(5));
        let ended = Source::try_start(&lab, &guest, Habits::qemu(1)).and_then(|mut source| {
            source.begin(false)?;
            source.send_block(0)?;
            source.finish()?;
            source.end()
        });
        assert!(ended.is_err(), "request {request}");
        drop(ended);
        if request > 1 {
            lab.assert_failed();
        }
        lab.assert_next_works(&guest);
        lab.assert_empty();
    }
}
