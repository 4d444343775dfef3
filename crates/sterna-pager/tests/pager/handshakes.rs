//! Peers that do not hand their memory over correctly. Only their guest is affected.

use sterna_pager::handshake::HandshakeError;
use sterna_pager::{
    FillRate, GuestEnd, GuestError, GuestStage, GuestStatistics, Pager, PagerOptions, SocketPlan,
};

use crate::common::{MIB, World, guest, served, until};

fn why(guest: &GuestStatistics) -> (&GuestError, bool) {
    match &guest.stage {
        GuestStage::Ended(GuestEnd::GivenUp { why, is_killed }) => (why, *is_killed),
        other => panic!("{other:?}"),
    }
}

#[test]
fn descriptor_may_come_with_the_last_byte() {
    let world = World::new(MIB);
    let _pager = world.pager(FillRate::Off);
    let Some(mut guest) = guest("descriptor_may_come_with_the_last_byte", 4096, &[MIB]) else { return };
    guest.hand_over(&world.socket(), "slow").unwrap();

    assert_eq!(guest.sum(0, MIB), Ok(world.sum(0, MIB)));
}

/// Each wrong peer is killed with its reason, and another guest of the same pager does not notice.
#[test]
fn wrong_peer_is_killed_and_named_while_another_is_served() {
    let world = World::new(2 * MIB);
    let ways = ["larger", "twice", "null", "garbage"];
    let plans: Vec<SocketPlan> =
        ["right"].iter().chain(&ways).map(|way| SocketPlan { path: world.path(way), guests: 1 }).collect();
    let options = PagerOptions { fill: FillRate::Off, ..PagerOptions::default() };
    let pager = Pager::start(world.source(), &plans, options).unwrap();
    let name = "wrong_peer_is_killed_and_named_while_another_is_served";
    let Some(mut right) = served(name, &[2 * MIB], &world.path("right")) else { return };

    for way in ways {
        let Some(mut wrong) = guest(name, 4096, &[2 * MIB]) else { return };
        // It may be killed before it answers.
        let _ = wrong.hand_over(&world.path(way), way);
        let status = wrong.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{way}");
    }
    let guests = until(&pager, "four refusals", |guests| guests.len() == 5);
    let reason = |way: &str| {
        let socket = world.path(way).display().to_string();
        let guest = guests.iter().find(|guest| guest.socket == socket).expect(way);
        let (why, is_killed) = why(guest);
        assert!(is_killed);
        let GuestError::Handshake(why) = why else { panic!("{why:?}") };
        why.clone()
    };
    let larger = HandshakeError::OtherMemory { regions: 2 * MIB + 4096, image: 2 * MIB };
    assert_eq!(reason("larger"), larger);
    assert_eq!(reason("twice"), HandshakeError::Descriptors { count: 2 });
    assert_eq!(reason("null"), HandshakeError::NoUserfaultfd { found: "/dev/null".to_owned() });
    assert!(matches!(reason("garbage"), HandshakeError::Garbage { .. }));
    assert_eq!(right.sum(0, 2 * MIB), Ok(world.sum(0, 2 * MIB)));
}

/// After a peer without a descriptor, the next one can connect to the same socket.
#[test]
fn peer_without_a_descriptor_is_killed_after_a_while() {
    let world = World::new(MIB);
    let pager = world.pager(FillRate::Off);
    let name = "peer_without_a_descriptor_is_killed_after_a_while";
    let Some(mut alone) = guest(name, 4096, &[MIB]) else { return };
    let _ = alone.hand_over(&world.socket(), "alone");
    alone.wait().unwrap();

    let guests = until(&pager, "the refusal", |guests| guests.len() == 1);
    let (why, _) = why(&guests[0]);
    assert!(matches!(why, GuestError::Handshake(HandshakeError::Descriptors { count: 0 })), "{why:?}");
    let Some(mut next) = served(name, &[MIB], &world.socket()) else { return };
    assert_eq!(next.sum(0, MIB), Ok(world.sum(0, MIB)));
}

/// A connection without a word, as a monitoring check makes it, is no guest and is not killed.
#[test]
fn connection_without_a_word_is_no_guest() {
    let world = World::new(MIB);
    let pager = world.pager(FillRate::Off);
    drop(std::os::unix::net::UnixStream::connect(world.socket()).unwrap());

    let Some(mut guest) = served("connection_without_a_word_is_no_guest", &[MIB], &world.socket()) else {
        return;
    };
    assert_eq!(guest.sum(0, MIB), Ok(world.sum(0, MIB)));
    assert_eq!(pager.guests().len(), 1);
}

#[test]
fn socket_disappears_when_its_guest_has_connected() {
    let world = World::new(MIB);
    let pager = world.pager(FillRate::Off);
    let name = "socket_disappears_when_its_guest_has_connected";
    let Some(_guest) = served(name, &[MIB], &world.socket()) else { return };
    until(&pager, "the guest", |guests| guests.len() == 1);

    let Some(mut late) = guest(name, 4096, &[MIB]) else { return };
    let refused = late.hand_over(&world.socket(), "whole").unwrap_err();
    assert!(refused.contains("No such file") || refused.contains("refused"), "{refused}");
}
