//! COLO's messages and their order at the standby: bytes of a QEMU 11.1.3, and single broken rules.

use crate::common::{seeded, unhex};
use proptest::collection::vec;
use proptest::prelude::*;
use sterna_wire::colo::{Due, Message, MessageKind, OrderError, StandbyOrder};
use sterna_wire::limits::DEVICE_STATE_BYTES;
use sterna_wire::{Fault, WireError};

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        Just(Message::CheckpointReady),
        Just(Message::CheckpointRequest),
        Just(Message::CheckpointReply),
        Just(Message::VmstateSend),
        (1..=DEVICE_STATE_BYTES).prop_map(|bytes| Message::VmstateSize { bytes }),
        Just(Message::VmstateReceived),
        Just(Message::VmstateLoaded),
    ]
}

fn encoded(messages: &[Message]) -> Vec<u8> {
    let mut out = Vec::new();
    messages.iter().for_each(|message| message.encode(&mut out).unwrap());
    out
}

fn decoded(mut bytes: &[u8]) -> Vec<Message> {
    let mut out = Vec::new();
    while let Some((message, used)) = Message::decode(bytes).unwrap() {
        out.push(message);
        bytes = &bytes[used..];
    }
    assert!(bytes.is_empty());
    out
}

#[test]
fn messages_of_a_captured_checkpoint_decode_and_encode_to_the_same_bytes() {
    let primary = unhex("00000001 00000003 00000004 000000000000e771");
    let standby = unhex("00000000 00000002 00000005 00000006");

    let said = [Message::CheckpointRequest, Message::VmstateSend, Message::VmstateSize { bytes: 59_249 }];
    let answered = [
        Message::CheckpointReady,
        Message::CheckpointReply,
        Message::VmstateReceived,
        Message::VmstateLoaded,
    ];

    assert_eq!((decoded(&primary), encoded(&said)), (said.to_vec(), primary.clone()));
    assert_eq!((decoded(&standby), encoded(&answered)), (answered.to_vec(), standby.clone()));
}

#[test]
fn message_encoded_decodes_to_itself_and_no_part_of_it_decodes() {
    seeded("colo_message", &vec(message(), 1..8), |messages| {
        let bytes = encoded(&messages);
        prop_assert_eq!(decoded(&bytes), messages.clone());

        let last = encoded(&messages[messages.len() - 1..]);
        for length in 0..last.len() {
            prop_assert_eq!(Message::decode(&last[..length]), Ok(None));
        }
        prop_assert!(last.len() <= Message::MAX_BYTES);
        Ok(())
    });
}

#[test]
fn message_with_a_number_that_none_has_is_refused() {
    for number in [7u32, 9, 0x0001_0000, u32::MAX] {
        let error = Message::decode(&number.to_be_bytes()).unwrap_err();

        assert_eq!((error.fault, error.offset), (Fault::PeerMisbehaved, 0));
        assert!(error.to_string().contains(&format!("message {number}; only 0 to 6 are known")), "{error}");
    }
}

#[test]
fn size_of_nothing_or_of_more_than_is_held_is_refused_both_ways() {
    for bytes in [0, DEVICE_STATE_BYTES + 1, 1 << 63, u64::MAX] {
        let wire = [&4u32.to_be_bytes()[..], &bytes.to_be_bytes()].concat();

        let error = Message::decode(&wire).unwrap_err();
        let own = Message::VmstateSize { bytes }.encode(&mut Vec::new()).unwrap_err();

        assert_eq!((error.fault, error.offset, own.fault), (Fault::PeerMisbehaved, 4, Fault::Local));
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    }
}

/// A standby's order at which step number `steps` is due.
fn order_after(steps: usize) -> StandbyOrder {
    let mut order = StandbyOrder::new();
    for _ in 0..steps {
        step(&mut order);
    }
    order
}

/// Performs the step that is due.
fn step(order: &mut StandbyOrder) {
    match order.due() {
        Due::Say(kind) => order.say(kind).unwrap(),
        Due::Hear(kind) => order.heard(&of_kind(kind)).unwrap(),
        Due::Ram => order.ram_came().unwrap(),
        Due::Devices { .. } => order.checkpoint_is_held().unwrap(),
    }
}

fn of_kind(kind: MessageKind) -> Message {
    let body = if kind == MessageKind::VmstateSize { 77u64.to_be_bytes().to_vec() } else { Vec::new() };
    let bytes = [&(kind as u32).to_be_bytes()[..], &body].concat();
    Message::decode(&bytes).unwrap().unwrap().0
}

/// Number of steps at the seeding's end and in one checkpoint.
const STEPS: usize = 9;

#[test]
fn order_of_two_checkpoints_is_that_of_the_protocol() {
    let mut order = StandbyOrder::new();
    let mut said = Vec::new();
    for _ in 0..2 * (STEPS - 1) + 1 {
        said.push(order.due());
        step(&mut order);
    }

    let checkpoint = [
        Due::Hear(MessageKind::CheckpointRequest),
        Due::Say(MessageKind::CheckpointReply),
        Due::Hear(MessageKind::VmstateSend),
        Due::Ram,
        Due::Hear(MessageKind::VmstateSize),
        Due::Devices { bytes: 77 },
        Due::Say(MessageKind::VmstateReceived),
        Due::Say(MessageKind::VmstateLoaded),
    ];
    assert_eq!(said[0], Due::Say(MessageKind::CheckpointReady));
    assert_eq!(said[1..STEPS], checkpoint);
    assert_eq!(said[STEPS..], checkpoint);
    assert!(order.may_rest());
}

#[test]
fn every_other_message_at_every_step_is_refused_by_name_and_changes_nothing() {
    for steps in 0..STEPS {
        let order = order_after(steps);
        for kind in MessageKind::ALL {
            let (mut hearing, mut saying) = (order.clone(), order.clone());
            match hearing.heard(&of_kind(kind)) {
                Ok(()) => assert_eq!(order.due(), Due::Hear(kind)),
                Err(error) => {
                    assert_eq!(hearing, order, "changed by {kind} at {:?}", order.due());
                    let expected = match order.due() {
                        Due::Hear(expected) => OrderError::Heard { came: kind, expected },
                        due => OrderError::OutOfTurn { came: kind, due },
                    };
                    assert_eq!(error, expected);
                    let error = WireError::from(error);
                    assert_eq!(error.fault, Fault::PeerMisbehaved);
                    assert!(error.to_string().contains(kind.name()), "{error}");
                }
            }
            match saying.say(kind) {
                Ok(()) => assert_eq!(order.due(), Due::Say(kind)),
                Err(error) => {
                    assert_eq!((&saying, error.fault()), (&order, Fault::Local));
                }
            }
        }
        let (mut ram, mut held) = (order.clone(), order.clone());
        assert_eq!(ram.ram_came().is_ok(), order.due() == Due::Ram);
        assert_eq!(held.checkpoint_is_held().is_ok(), matches!(order.due(), Due::Devices { .. }));
        assert_eq!(order.may_rest(), order.due() == Due::Hear(MessageKind::CheckpointRequest));
    }
}

#[test]
fn received_cannot_be_said_before_all_is_held() {
    for steps in 0..STEPS - 2 {
        let mut order = order_after(steps);

        assert!(order.say(MessageKind::VmstateReceived).is_err(), "at {:?}", order.due());
    }
}
