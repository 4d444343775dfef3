//! Every wrong order is refused: each error names the message, the rule and the fault.

use sterna_wire::rdma::session::{
    Arrival, Command, Commander, DestinationSession, Heard, Listener, Peer, Sending, SourceSession,
};
use sterna_wire::rdma::{
    BlockPlace, Message, MessageType, RegisterResult, encode_empty, encode_file, encode_records,
};
use sterna_wire::{Fault, WireError};

const HOOKED: Command = Command::File { bytes: 8, hook_ends_at: Some(8) };
const STREAM: Command = Command::File { bytes: 8, hook_ends_at: None };

fn bytes(kind: MessageType) -> Vec<u8> {
    let mut out = Vec::new();
    match kind {
        MessageType::File => encode_file(&[0; 8], &mut out),
        MessageType::RamBlocksResult => encode_records::<BlockPlace>(&[], &mut out),
        MessageType::RegisterResult => {
            encode_records(&[RegisterResult { key: 1, host_address: 2 }], &mut out)
        }
        other => encode_empty(other, 1, &mut out),
    }
    .unwrap();
    out
}

fn refused<T: std::fmt::Debug>(result: Result<T, WireError>, kind: MessageType, fault: Fault, words: &str) {
    let error = result.expect_err(words);
    assert_eq!((error.message, error.fault), (kind.name(), fault), "{error}");
    assert!(error.to_string().contains(words), "{error}");
    assert!(error.paragraph.starts_with("specs/rdma.md §"), "{error}");
}

/// A commander that has received a READY.
fn ready() -> Commander {
    let mut commander = Commander::new();
    assert_eq!(commander.starting(), 2);
    assert_eq!(commander.received(MessageType::Ready), Ok(Heard::Ready));
    commander
}

/// A commander that waits for the answer to `command`.
fn asking(command: MessageType) -> Commander {
    let mut commander = ready();
    assert_eq!(commander.send(command), Ok(Sending { receives: 2 }));
    commander
}

#[test]
fn commander_posts_receives_for_all_that_may_come() {
    let mut commander = ready();
    assert!(commander.may_send());
    assert_eq!(commander.send(MessageType::File), Ok(Sending { receives: 1 }));
    assert!(!commander.may_send() && !commander.is_owed());
    assert_eq!(commander.received(MessageType::Ready), Ok(Heard::Ready));
    assert_eq!(commander.send(MessageType::RegisterRequest), Ok(Sending { receives: 2 }));
    assert!(commander.is_owed());
    let answer = MessageType::RegisterResult;
    assert_eq!(commander.received(answer), Ok(Heard::Answer(answer)));
    assert_eq!(commander.received(MessageType::Ready), Ok(Heard::Ready));
    assert!(commander.may_send());
}

#[test]
fn commander_sends_only_commands_and_only_with_a_ready() {
    use MessageType::*;
    for command in [File, Compress, RamBlocksRequest, RegisterRequest, RegisterFinished, UnregisterRequest] {
        refused(Commander::new().send(command), command, Fault::Local, "no READY");
    }
    for other in [Error, Ready, RamBlocksResult, RegisterResult, UnregisterFinished] {
        refused(ready().send(other), other, Fault::Local, "it is not a command");
    }
    let mut used = ready();
    let _ = used.send(File);
    refused(used.send(File), File, Fault::Local, "no READY");
    for (command, answer) in [
        (RamBlocksRequest, "RAM_BLOCKS_RESULT"),
        (RegisterRequest, "REGISTER_RESULT"),
        (UnregisterRequest, "UNREGISTER_FINISHED"),
    ] {
        refused(asking(command).send(File), File, Fault::Local, answer);
        assert_eq!(command.answer().map(MessageType::name), Some(answer));
    }
    // A refused command has not changed the state.
    let mut commander = ready();
    assert!(commander.send(Ready).is_err());
    assert_eq!(commander.send(File), Ok(Sending { receives: 1 }));
}

#[test]
fn commander_refuses_messages_out_of_order() {
    use MessageType::*;
    refused(ready().received(Ready), Ready, Fault::PeerMisbehaved, "the previous one is unused");
    refused(asking(RegisterRequest).received(Ready), Ready, Fault::PeerMisbehaved, "before REGISTER_RESULT");
    for answer in [RamBlocksResult, RegisterResult, UnregisterFinished] {
        refused(ready().received(answer), answer, Fault::PeerMisbehaved, "no command was sent");
    }
    for wrong in [RamBlocksResult, UnregisterFinished, File, RegisterRequest] {
        refused(
            asking(RegisterRequest).received(wrong),
            wrong,
            Fault::PeerMisbehaved,
            "REGISTER_RESULT is due",
        );
    }
    for command in [File, Compress, RamBlocksRequest, RegisterRequest, RegisterFinished, UnregisterRequest] {
        refused(ready().received(command), command, Fault::PeerMisbehaved, "only this side sends commands");
    }
    let mut twice = asking(RegisterRequest);
    twice.received(RegisterResult).unwrap();
    refused(twice.received(RegisterResult), RegisterResult, Fault::PeerMisbehaved, "no command was sent");
    assert!(twice.is_over());
    refused(twice.send(File), File, Fault::Local, "ended");
    // No receive was posted for the message, so the caller has counted wrongly.
    refused(Commander::new().received(Ready), Ready, Fault::Local, "no receive was posted");
}

#[test]
fn error_ends_a_session_and_is_not_answered() {
    let mut commander = ready();
    assert_eq!(commander.received(MessageType::Error), Ok(Heard::Failed));
    assert!(!commander.may_send());
    refused(commander.say_error(), MessageType::Error, Fault::Local, "ended");

    let mut commander = ready();
    assert_eq!(commander.say_error(), Ok(()));
    refused(commander.send(MessageType::File), MessageType::File, Fault::Local, "ended");
    refused(commander.say_error(), MessageType::Error, Fault::Local, "ended");

    let mut listener = invited();
    assert_eq!(listener.received(MessageType::Error), Ok(()));
    assert!(listener.is_over() && !listener.may_invite());
    refused(listener.say_error(), MessageType::Error, Fault::Local, "ended");
    refused(listener.invite(), MessageType::Ready, Fault::Local, "ended");

    // After the last command, the destination may fail, and a READY may be left over as well.
    let mut commander = ready();
    let _ = commander.send(MessageType::File);
    commander.finish();
    assert_eq!(commander.received(MessageType::Ready), Ok(Heard::Ready));
    assert_eq!(commander.received(MessageType::Error), Ok(Heard::Failed));
}

/// A listener that has sent READY.
fn invited() -> Listener {
    let mut listener = Listener::of_main();
    assert_eq!(listener.starting(), 2);
    assert_eq!(listener.invite(), Ok(Sending { receives: 0 }));
    listener
}

#[test]
fn listener_invites_one_command_and_answers_it_first() {
    use MessageType::*;
    let mut listener = invited();
    refused(listener.invite(), Ready, Fault::Local, "unanswered");
    listener.received(RegisterRequest).unwrap();
    assert_eq!(listener.owes(), Some(RegisterResult));
    refused(listener.invite(), Ready, Fault::Local, "REGISTER_RESULT must be sent first");
    refused(
        listener.answer(RamBlocksResult),
        RamBlocksResult,
        Fault::Local,
        "REGISTER_RESULT has not been sent yet",
    );
    assert_eq!(listener.answer(RegisterResult), Ok(Sending { receives: 0 }));
    refused(listener.answer(RegisterResult), RegisterResult, Fault::Local, "no command was received");
    assert_eq!(listener.invite(), Ok(Sending { receives: 1 }));
}

#[test]
fn listener_refuses_messages_out_of_order() {
    use MessageType::*;
    let mut early = Listener::of_main();
    let _ = early.starting();
    refused(early.received(File), File, Fault::PeerMisbehaved, "no READY was sent");
    for other in [Ready, RamBlocksResult, RegisterResult, UnregisterFinished] {
        refused(invited().received(other), other, Fault::PeerMisbehaved, "does not accept it");
    }
    let mut owing = invited();
    owing.received(UnregisterRequest).unwrap();
    refused(owing.received(File), File, Fault::PeerMisbehaved, "does not wait for UNREGISTER_FINISHED");
    let mut second = invited();
    second.received(File).unwrap();
    refused(second.received(File), File, Fault::PeerMisbehaved, "no READY was sent");
    refused(second.received(File), File, Fault::Local, "no receive was posted");
}

/// A source in the phase with this number, with a READY. It knows the blocks from the second phase on.
fn source(peer: Peer, phases: usize) -> SourceSession {
    let mut session = SourceSession::new(peer);
    assert_eq!(session.starting(), 2);
    let go = |session: &mut SourceSession, command: Command| {
        session.received(&Message::Ready).unwrap();
        let _ = session.send(command).unwrap();
        if let Some(answer) = command.kind().answer() {
            session.received(&Message::decode(&bytes(answer)).unwrap()).unwrap();
        }
    };
    for phase in 0..phases {
        if phase > 0 {
            go(&mut session, Command::Finished);
        }
        go(&mut session, HOOKED);
        if phase == 0 && phases > 1 {
            go(&mut session, Command::RamBlocks);
        }
    }
    session.received(&Message::Ready).unwrap();
    session
}

#[test]
fn source_sends_each_command_in_its_phase_only() {
    use MessageType::*;
    let all = [
        Command::RamBlocks,
        Command::Compress(1),
        Command::Register(1),
        Command::Unregister(1),
        Command::Finished,
    ];
    for command in all {
        refused(source(Peer::Sterna, 0).send(command), command.kind(), Fault::Local, "no phase is open");
    }
    for command in &all[1..] {
        let session = source(Peer::Sterna, 1).send(*command);
        refused(session, command.kind(), Fault::Local, "for the exchange of blocks");
    }
    assert!(source(Peer::Sterna, 1).send(Command::RamBlocks).is_ok());
    for command in &all[1..] {
        assert!(source(Peer::Sterna, 2).send(*command).is_ok(), "{command:?}");
    }
    refused(
        source(Peer::Sterna, 2).send(Command::RamBlocks),
        RamBlocksRequest,
        Fault::Local,
        "have already been exchanged",
    );
    for phase in [1, 2] {
        refused(source(Peer::Sterna, phase).send(STREAM), File, Fault::Local, "stream data is not permitted");
    }
    assert!(source(Peer::Sterna, 0).send(STREAM).is_ok());
    for command in [Command::Compress(0), Command::Register(0), Command::Unregister(0)] {
        refused(source(Peer::Sterna, 2).send(command), command.kind(), Fault::Local, "no record");
    }
}

#[test]
fn source_ends_a_message_with_its_hook() {
    for at in [0, 7, 9] {
        let command = Command::File { bytes: 8, hook_ends_at: Some(at) };
        let sent = source(Peer::Qemu, 0).send(command);
        refused(sent, MessageType::File, Fault::Local, "the last of its message");
    }
    let mut session = source(Peer::Qemu, 0);
    assert!(session.send(HOOKED).is_ok() && session.is_in_phase());
}

#[test]
fn source_spares_a_qemu_what_it_takes_wrongly() {
    for command in [Command::Compress(2), Command::Register(2)] {
        assert!(source(Peer::Sterna, 2).send(command).is_ok());
        refused(source(Peer::Qemu, 2).send(command), command.kind(), Fault::Local, "reads only the first");
    }
    let command = Command::Unregister(1);
    refused(source(Peer::Qemu, 2).send(command), command.kind(), Fault::Local, "unregistered");
    let mut met = source(Peer::Qemu, 2);
    met.met(Peer::Sterna);
    assert!(met.send(command).is_ok());
}

#[test]
fn source_writes_in_phases_and_ends_them_when_all_writes_are_complete() {
    for phase in [0, 1] {
        let error = source(Peer::Qemu, phase).write().unwrap_err();
        assert_eq!((error.message, error.fault), ("WRITE", Fault::Local), "{error}");
    }
    let mut session = source(Peer::Qemu, 2);
    session.write().unwrap();
    session.write().unwrap();
    refused(session.send(Command::Finished), MessageType::RegisterFinished, Fault::Local, "2 WRITEs");
    session.completed(1).unwrap();
    refused(session.send(Command::Finished), MessageType::RegisterFinished, Fault::Local, "1 WRITEs");
    assert_eq!(session.completed(2).unwrap_err().fault, Fault::Local);
    assert_eq!(session.writes_in_flight(), 1);

    // While an answer is due, WRITEs may be posted.
    let _ = session.send(Command::Register(1)).unwrap();
    assert!(!session.may_send());
    session.write().unwrap();
    session.received(&Message::decode(&bytes(MessageType::RegisterResult)).unwrap()).unwrap();
    session.received(&Message::Ready).unwrap();
    session.completed(2).unwrap();
    assert!(session.send(Command::Finished).is_ok() && !session.is_in_phase());
    assert!(session.write().is_err());
}

#[test]
fn source_takes_as_many_results_as_it_asked_for() {
    let mut session = source(Peer::Sterna, 2);
    let _ = session.send(Command::Register(2)).unwrap();
    let one = bytes(MessageType::RegisterResult);
    let answer = session.received(&Message::decode(&one).unwrap());
    refused(answer, MessageType::RegisterResult, Fault::PeerMisbehaved, "1 results, but 2 were requested");
    refused(session.send(Command::Compress(1)), MessageType::Compress, Fault::Local, "ended");
}

#[test]
fn source_is_done_when_all_is_sent_and_not_before() {
    refused(source(Peer::Qemu, 2).finish(), MessageType::RegisterFinished, Fault::Local, "has not been sent");
    let mut session = source(Peer::Qemu, 0);
    assert_eq!(session.disconnected().unwrap_err().fault, Fault::PeerMisbehaved);
    let mut session = source(Peer::Qemu, 0);
    session.finish().unwrap();
    assert_eq!(session.disconnected(), Ok(()));
    refused(session.send(STREAM), MessageType::File, Fault::Local, "ended");
}

/// A destination in the phase with this number, after it sent READY. The blocks were requested from the second
/// phase on.
fn destination(phases: usize) -> DestinationSession {
    let mut session = DestinationSession::new();
    assert_eq!(session.starting(), 2);
    let take = |session: &mut DestinationSession, kind: MessageType| {
        let _ = session.invite().unwrap();
        session.received(kind).unwrap();
        if let Some(answer) = kind.answer() {
            let _ = session.answer(answer).unwrap();
        }
    };
    for phase in 0..phases {
        if phase > 0 {
            take(&mut session, MessageType::RegisterFinished);
        }
        take(&mut session, MessageType::File);
        session.hook().unwrap();
        if phase == 0 && phases > 1 {
            take(&mut session, MessageType::RamBlocksRequest);
        }
    }
    let _ = session.invite().unwrap();
    session
}

#[test]
fn destination_takes_each_command_in_its_phase_only() {
    use MessageType::*;
    let all = [RamBlocksRequest, Compress, RegisterRequest, UnregisterRequest, RegisterFinished];
    for command in all {
        refused(destination(0).received(command), command, Fault::PeerMisbehaved, "no phase is open");
    }
    for command in &all[1..] {
        let taken = destination(1).received(*command);
        refused(taken, *command, Fault::PeerMisbehaved, "begins with the exchange");
    }
    assert_eq!(destination(1).received(RamBlocksRequest), Ok(Arrival::Blocks));
    let arrivals = [Arrival::Clear, Arrival::Register, Arrival::Unregister, Arrival::PhaseOver];
    for (command, arrival) in all[1..].iter().zip(arrivals) {
        assert_eq!(destination(2).received(*command), Ok(arrival));
    }
    refused(
        destination(2).received(RamBlocksRequest),
        RamBlocksRequest,
        Fault::PeerMisbehaved,
        "exchanged once",
    );
    for phase in [1, 2] {
        refused(destination(phase).received(File), File, Fault::PeerMisbehaved, "while a phase is open");
    }
    assert_eq!(destination(0).received(File), Ok(Arrival::Stream));
    assert_eq!(destination(2).received(Error), Ok(Arrival::Failed));

    // A second request in the same phase.
    let mut session = destination(1);
    session.received(RamBlocksRequest).unwrap();
    let _ = session.answer(RamBlocksResult).unwrap();
    let _ = session.invite().unwrap();
    refused(session.received(RamBlocksRequest), RamBlocksRequest, Fault::PeerMisbehaved, "exchanged once");
    refused(session.invite(), Ready, Fault::Local, "ended");
}

#[test]
fn destination_finds_a_hook_before_it_invites_the_next_message() {
    let file = MessageType::File;
    refused(destination(0).hook(), file, Fault::Local, "to its end before READY");
    let mut open = destination(1);
    open.received(MessageType::RamBlocksRequest).unwrap();
    let _ = open.answer(MessageType::RamBlocksResult).unwrap();
    refused(open.hook(), file, Fault::Local, "while a phase is open");
    assert!(open.is_in_phase());
}

#[test]
fn destination_is_done_when_all_has_come_and_not_before() {
    refused(destination(1).finish(), MessageType::File, Fault::Local, "while a phase is open");
    assert_eq!(destination(0).disconnected().unwrap_err().fault, Fault::PeerMisbehaved);
    let mut session = destination(0);
    session.finish().unwrap();
    assert_eq!(session.disconnected(), Ok(()));
    let mut failed = destination(0);
    assert_eq!(failed.say_error(), Ok(()));
    refused(failed.invite(), MessageType::Ready, Fault::Local, "ended");
}
