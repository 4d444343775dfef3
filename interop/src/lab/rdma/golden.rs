//! Compares the bytes that a Sterna and a QEMU send for the same machine. The destination is a QEMU. They
//! must be equal, with three exceptions: the introduction in the private data, Sterna's PINGs if there is a
//! return path (`specs/extension.md`), and the division of memory into phases and windows.

use sterna_wire::rdma::{ConnectRequest, Message, MessageType, Part};

use super::capture::Conversation;
use super::way::Way;
use crate::Failure;

/// Bytes of the private data that a QEMU sends.
const PLAIN_BYTES: usize = 8;
/// The part of a stream that only starts a phase: type 2, the section's number, hook, end of section, footer.
const HOOK: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0x80];
const END_OF_SECTION: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0x10];
const FOOTER: u8 = 0x7e;

/// The command of Sterna's PING, without the byte that identifies it. It is sent at the greeting, at
/// *prepare*, and while the stream is silent.
const PING: [u8; 8] = [8, 0, 2, 0, 4, 0x53, 0x54, 0x4e];
const PINGS: [u8; 4] = [1, 2, 3, 5];

/// Compares the connections of a QEMU with those of a Sterna. `of_qemu` goes to a Sterna, and `of_sterna`
/// from that Sterna to another QEMU.
pub(super) fn compare(way: Way, of_qemu: &[Conversation], of_sterna: &[Conversation]) -> Result<(), Failure> {
    let wanted = 1 + usize::from(way.return_path);
    if of_qemu.len() != wanted || of_sterna.len() != wanted {
        return Err(format!("{} and {} connections, not {wanted}", of_qemu.len(), of_sterna.len()));
    }
    let parts = [Part::Main, Part::ReturnPath];
    for ((qemu, sterna), part) in of_qemu.iter().zip(of_sterna).zip(parts) {
        connected(way, qemu, sterna, part).map_err(|why| format!("{part}: {why}"))?;
    }
    for (who, conversations) in [("QEMU", of_qemu), ("Sterna", of_sterna)] {
        let mut messages = conversations.iter().flat_map(|one| &one.messages);
        messages.try_for_each(|message| plain(message)).map_err(|why| format!("{who}: {why}"))?;
    }
    let [of_qemu, of_sterna] = [of_qemu, of_sterna].map(|all| Said::by(&all[0]));
    let (of_qemu, of_sterna) = (of_qemu?, of_sterna?);
    if of_qemu.order != of_sterna.order {
        return Err(format!("QEMU sends {:?}, Sterna {:?}", of_qemu.order, of_sterna.order));
    }
    let stream = PINGS
        .iter()
        .filter(|_| way.return_path)
        .fold(of_sterna.stream, |stream, which| without(&stream, &[&PING[..], &[*which]].concat()));
    equal("the stream", &of_qemu.stream, &stream)
}

/// Both request the connection with the same data, except that Sterna adds its introduction.
fn connected(way: Way, qemu: &Conversation, sterna: &Conversation, part: Part) -> Result<(), Failure> {
    let plain = [0, 0, 0, 1, 0, 0, 0, u8::from(way.pin_all)];
    let [theirs, ours] = [qemu, sterna].map(|one| &one.request.private_data);
    equal("QEMU's private data", &plain, &theirs[..PLAIN_BYTES])?;
    equal("Sterna's private data", &plain, &ours[..PLAIN_BYTES])?;
    let decoded = ConnectRequest::decode(ours).map_err(|error| error.to_string())?;
    let introduction = decoded.introduction.ok_or("Sterna does not introduce itself")?;
    equal("Sterna's introduction", &decoded.to_bytes(), ours)?;
    if introduction.part != part || ConnectRequest::decode(theirs).is_ok_and(|it| it.introduction.is_some()) {
        return Err(format!("introduced as {}", introduction.part));
    }
    equal("QEMU's reply", &plain, &sterna.reply.private_data[..PLAIN_BYTES])?;
    equal("resources, depth and retries", &qemu.request.conditions(), &sterna.request.conditions())
}

/// Checks the encoding of a message: zeros in its padding, and at most one record.
fn plain(message: &[u8]) -> Result<(), Failure> {
    let decoded = Message::decode(message).map_err(|error| error.to_string())?;
    let repeat = u8::from(decoded.kind() != MessageType::File);
    let is_single = match decoded {
        Message::Compress(ranges) => ranges.len() == 1,
        Message::RegisterRequest(requests) => requests.len() == 1,
        Message::RamBlocksRequest | Message::RegisterFinished | Message::Ready => message.len() == 16,
        Message::File(_) => true,
        _ => false,
    };
    if is_single && message[8..16] == [0, 0, 0, repeat, 0, 0, 0, 0] {
        Ok(())
    } else {
        Err(format!("{} is {message:02x?}", decoded.kind().name()))
    }
}

/// Messages of a source on its main connection.
struct Said {
    /// The stream without sections that only start a phase.
    stream: Vec<u8>,
    /// Kinds of the messages that are not about memory. Consecutive messages with stream count as one.
    order: Vec<MessageType>,
}

impl Said {
    fn by(main: &Conversation) -> Result<Self, Failure> {
        let (mut stream, mut kinds) = (Vec::new(), Vec::new());
        for message in &main.messages {
            let message = Message::decode(message).map_err(|error| error.to_string())?;
            if let Message::File(bytes) = message {
                stream.extend_from_slice(bytes);
            }
            kinds.push(message.kind());
        }
        kinds.retain(|kind| !matches!(kind, MessageType::Compress | MessageType::RegisterRequest));
        Ok(Self { stream: without_parts(&stream)?, order: order(&kinds) })
    }
}

/// The numbers of phases and of messages with stream differ. Therefore several count as one, also with phases
/// between them.
fn order(kinds: &[MessageType]) -> Vec<MessageType> {
    let mut order: Vec<MessageType> = Vec::new();
    for kind in kinds {
        match order[..] {
            [.., MessageType::File] if *kind == MessageType::File => {}
            [.., before, last] if before == *kind && last == MessageType::RegisterFinished => {
                order.pop();
            }
            _ => order.push(*kind),
        }
    }
    order
}

fn without_parts(stream: &[u8]) -> Result<Vec<u8>, Failure> {
    const START: &[u8] = b"\x03ram\0\0\0\0";
    let at = stream.windows(START.len()).position(|bytes| bytes == START).filter(|at| *at >= 4);
    let number = &stream[at.ok_or("there is no section of RAM")? - 4..][..4];
    let part = [&[2], number, &HOOK, &END_OF_SECTION, &[FOOTER], number].concat();
    Ok(without(stream, &part))
}

fn without(stream: &[u8], piece: &[u8]) -> Vec<u8> {
    let (mut rest, mut kept) = (stream, Vec::new());
    while let Some(at) = rest.windows(piece.len()).position(|bytes| bytes == piece) {
        kept.extend_from_slice(&rest[..at]);
        rest = &rest[at + piece.len()..];
    }
    kept.extend_from_slice(rest);
    kept
}

fn equal(what: &str, wanted: &[u8], found: &[u8]) -> Result<(), Failure> {
    if wanted == found {
        return Ok(());
    }
    let at = wanted.iter().zip(found).take_while(|(a, b)| a == b).count();
    let near = |bytes: &[u8]| {
        format!("{:02x?}", &bytes[at.saturating_sub(24).min(bytes.len())..bytes.len().min(at + 40)])
    };
    Err(format!(
        "{what}: {} bytes, not {}; the first that differs is {at}: {} instead of {}",
        found.len(),
        wanted.len(),
        near(found),
        near(wanted)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use MessageType::{File, RamBlocksRequest as Blocks, RegisterFinished as Finished};

    #[test]
    fn order_is_the_same_for_any_number_of_phases() {
        let few = [File, Blocks, Finished, File, Finished, File];
        let many = [File, File, Blocks, Finished, File, Finished, File, File, Finished, File];
        let wrong = [File, Finished, Blocks, Finished, File, Finished, File];
        let twice = [File, Blocks, Finished, File, Finished, Finished, File];

        assert_eq!(order(&few), order(&many));
        assert_ne!(order(&few), order(&wrong));
        assert_ne!(order(&few), order(&twice));
    }

    #[test]
    fn sections_that_only_open_a_phase_do_not_count() {
        let start = b"\x01\0\0\0\x05\x03ram\0\0\0\0blocks";
        let part = b"\x02\0\0\0\x05\0\0\0\0\0\0\0\x80\0\0\0\0\0\0\0\x10\x7e\0\0\0\x05";
        let stream = |parts: usize| [&start[..], &part.repeat(parts), b"end"].concat();

        assert_eq!(without_parts(&stream(3)).unwrap(), stream(0));
        assert!(without_parts(b"no ram").is_err());
    }
}
