//! Sources that are silent for an allowed time, and sources that have failed.

use crate::common;

use std::time::Duration;

use crate::support;
use crate::support::recording::{Recording, Sent};
use crate::support::{assert_reset, case, eventually, waiting};
use sterna::{Arrival, Capabilities, MigrationError, Parameters, Status};
use sterna_transport::TransportError;
use sterna_wire::extension::EXTENSION_PING;

/// Header of RAM's END section.
const RAM_END: &[u8] = &[3, 0, 0, 0, 1];
/// Header of a PART section of RAM. Its flush waits for the lanes.
const RAM_PART: &[u8] = &[2, 0, 0, 0, 1];
/// The command OPEN_RETURN_PATH.
const OPEN: &[u8] = &[8, 0, 1, 0, 0];

fn settings(lanes: u8) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(lanes.max(1));
    capabilities.multifd = lanes > 0;
    params.limits = support::short_limits();
    (params, capabilities)
}

fn recording(lanes: u8, return_path: bool) -> Recording {
    let mut recording = Recording::take("sterna-process", lanes);
    let name = recording.find(b"\0\0\0\x07paused\0");
    recording.main[name..name + 12].copy_from_slice(b"\0\0\0\x08running\0");
    if return_path { recording.with_return_path() } else { recording }
}

/// Several times the limit after which the destination treats silence as a failure.
fn long() -> Duration {
    support::short_limits().stall * 4
}

#[test]
fn main_channel_may_be_silent_while_a_lane_moves() {
    case("a pass longer than the limit", || {
        let recording = recording(2, false);
        let (params, capabilities) = settings(2);
        let (target, incoming) = waiting(&params, capabilities);
        let busy = recording.busiest_lane();
        let packets = recording.packets(busy);
        let pause = long() / (packets.len() as u32 - 1);
        let mut sent = Sent::default();
        let (before, behind) = recording.main.split_at(recording.find(RAM_PART));
        sent.channel_with_pauses(&incoming.address(), vec![before.to_vec(), behind.to_vec()], long() + pause);
        sent.channel(&incoming.address(), recording.lanes[1 - busy].clone(), true);
        sent.channel_with_pauses(&incoming.address(), packets, pause);
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
        common::assert_lives_on(&target.guest);
    });
}

#[test]
fn source_that_waits_for_its_operator_may_be_silent_on_every_channel() {
    for (lanes, return_path) in [(0, false), (0, true), (2, false), (2, true)] {
        let recording = recording(lanes, return_path);
        let end = recording.find(RAM_END);
        // QEMU sends the footer of the previous section only when it continues.
        for at in [end, end - 5] {
            case(&format!("{lanes} lanes, return path {return_path}, silent at {at}"), || {
                let (params, capabilities) = settings(lanes);
                let (target, incoming) = waiting(&params, capabilities);
                let mut sent = Sent::default();
                let (before, behind) = recording.main.split_at(at);
                sent.channel_with_pauses(&incoming.address(), vec![before.to_vec(), behind.to_vec()], long());
                for lane in 0..usize::from(lanes) {
                    sent.channel(&incoming.address(), recording.lanes[lane].clone(), true);
                }
                let arrival = incoming.wait();
                assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
                common::assert_lives_on(&target.guest);
            });
        }
    }
}

/// Asserts that a destination fails whose source sends `main` bytes and then nothing, with open connections.
fn silent_behind(recording: &Recording, lanes: u8, main: usize) {
    let (params, capabilities) = settings(lanes);
    let (target, incoming) = waiting(&params, capabilities);
    let mut sent = Sent::default();
    sent.channel(&incoming.address(), recording.main[..main].to_vec(), true);
    for lane in 0..usize::from(lanes) {
        sent.channel(&incoming.address(), recording.lanes[lane].clone(), true);
    }
    eventually("the end", || incoming.status() == Status::Failed);
    let Arrival::Failed(why) = incoming.wait() else { panic!("completed") };
    drop(sent);
    assert_reset(&target);
    let MigrationError::Transport(end) = &why else { panic!("{why}") };
    assert!(matches!(**end, TransportError::Stalled { .. }), "{why}");
}

#[test]
fn half_an_element_and_then_silence_is_a_source_that_is_gone() {
    for lanes in [0, 2] {
        let recording = recording(lanes, false);
        let end = recording.find(RAM_END);
        // In the previous footer, in the section, and in its header. Before the end of the configuration no migration
        // has begun (`peer_connections`): the connection is rejected, and the destination waits for another one.
        for at in [end - 2, end + 2, end + RAM_END.len() + 3] {
            case(&format!("{lanes} lanes, silent at {at}"), || silent_behind(&recording, lanes, at));
        }
    }
}

#[test]
fn half_a_packet_and_then_silence_is_a_source_that_is_gone() {
    let mut recording = recording(2, false);
    let busy = recording.busiest_lane();
    let packets = recording.packets(busy);
    let full = packets.iter().position(|packet| packet.len() > 4096).unwrap();
    let before: usize = packets[..full].iter().map(Vec::len).sum();
    for half in [20, 1000, 3000] {
        recording.lanes[busy].truncate(before + half);
        let main = recording.find(RAM_PART);
        case(&format!("{half} bytes of a packet"), || silent_behind(&recording, 2, main));
    }
}

#[test]
fn sterna_that_has_promised_to_speak_and_is_silent_is_gone() {
    let mut recording = recording(0, true);
    let at = recording.find(OPEN) + OPEN.len();
    recording.insert(at, &[&[8, 0, 2, 0, 4][..], &EXTENSION_PING.to_be_bytes()].concat());
    let end = recording.find(RAM_END);
    case("between elements", || silent_behind(&recording, 0, end));
}
