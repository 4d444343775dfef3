//! Tests of checkpoints that are sent to the standby while QEMU's guest runs.

use super::super::packets::tests::packet;
use super::super::words::tests::{REQUEST, checkpoint};
use super::*;

const RECEIVED_AND_LOADED: [u8; 8] = [0, 0, 0, 5, 0, 0, 0, 6];
/// Long enough to detect an unexpected message.
const MOMENT: Duration = Duration::from_millis(100);

impl Lab {
    /// Runs the protocol up to REPLY 1, which QEMU has read.
    fn first_reply(&mut self) {
        self.say(&[&SHUT, &READY]);
        assert_eq!(self.step(), "ready");
        self.go.send(true).unwrap();
        assert_eq!(read::<12>(&mut self.qemu)[..], [&SHUT[..], &READY].concat());
        self.qemu.write_all(&REQUEST).unwrap();
        assert_eq!(read(&mut self.standby), REQUEST);
        self.reply(1);
    }

    fn reply(&mut self, number: u64) {
        self.say(&[&REPLY]);
        assert_eq!(self.step(), format!("reply {number}"));
        self.go.send(true).unwrap();
        assert_eq!(read(&mut self.qemu), REPLY);
    }

    /// Checks that this side reports checkpoint `number` as held.
    fn is_answered(&mut self, number: u64) {
        assert_eq!(self.step(), format!("received {number}"));
        self.hears_nothing();
        self.go.send(true).unwrap();
        assert_eq!(read(&mut self.qemu), RECEIVED_AND_LOADED);
    }

    fn standby_reads(&mut self, expected: &[u8]) {
        let mut come = vec![0; expected.len()];
        self.standby.read_exact(&mut come).unwrap();
        assert!(come == expected, "what came is not what was said");
    }

    fn standby_hears_nothing(&mut self) {
        self.standby.set_read_timeout(Some(MOMENT)).unwrap();
        let heard = self.standby.read(&mut [0; 1]);
        assert!(heard.is_err(), "{heard:?}");
        self.standby.set_read_timeout(Some(PATIENCE)).unwrap();
    }

    fn no_step(&self) {
        let step = self.steps.recv_timeout(MOMENT);
        assert!(step.is_err(), "{step:?}");
    }
}

#[test]
fn qemu_hears_that_a_checkpoint_is_held_when_it_is_here_and_the_next_one_waits_for_the_standby() {
    let mut lab = lab_that_keeps(1 << 20, 0);
    lab.first_reply();
    for number in 1..4 {
        let (last, all) = checkpoint(0).split_last().map(|(last, all)| (*last, all.to_vec())).unwrap();
        lab.qemu.write_all(&all).unwrap();
        lab.no_step();
        lab.qemu.write_all(&[last]).unwrap();
        lab.is_answered(number);
        assert!(lab.relay.waits_because().is_none());

        // The guest runs, and QEMU requests the next checkpoint.
        lab.qemu.write_all(&REQUEST).unwrap();
        lab.standby_reads(&checkpoint(0));
        lab.standby_hears_nothing();
        lab.say(&[&RECEIVED, &LOADED]);
        assert_eq!(read(&mut lab.standby), REQUEST);
        lab.no_step();
        lab.hears_nothing();
        lab.reply(number + 1);
    }
}

#[test]
fn checkpoint_is_here_when_each_multifd_channel_has_brought_its_syncs() {
    let mut lab = lab_that_keeps(1 << 20, 1);
    let mut pages = UnixStream::connect(&lab.relay.path).unwrap();
    let initial = [0x11; 64];
    pages.write_all(&initial).unwrap();
    let (mut far, _) = lab.listener.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(read(&mut far), initial);
    lab.first_reply();

    lab.qemu.write_all(&checkpoint(2)).unwrap();
    pages.write_all(&[packet(false, 3), packet(true, 0)].concat()).unwrap();
    lab.standby_reads(&checkpoint(2));
    lab.no_step();
    pages.write_all(&packet(true, 0)).unwrap();

    lab.is_answered(1);
    let expected = [packet(false, 3), packet(true, 0), packet(true, 0)].concat();
    let mut come = vec![0; expected.len()];
    far.read_exact(&mut come).unwrap();
    assert!(come == expected);
}

#[test]
fn last_checkpoint_waits_for_the_standby_itself() {
    let mut lab = lab_that_keeps(1 << 20, 0);
    lab.recorder.is_last.store(true, Ordering::SeqCst);
    lab.first_reply();
    lab.qemu.write_all(&checkpoint(0)).unwrap();
    lab.standby_reads(&checkpoint(0));
    lab.no_step();
    lab.say(&[&RECEIVED, &LOADED]);
    assert_eq!(lab.step(), "received 1");
    lab.go.send(false).unwrap();
    lab.hears_nothing();
}

#[test]
fn guest_that_may_not_run_on_is_not_answered() {
    let mut lab = lab_that_keeps(1 << 20, 0);
    lab.first_reply();
    lab.qemu.write_all(&checkpoint(0)).unwrap();
    assert_eq!(lab.step(), "received 1");
    lab.go.send(false).unwrap();
    lab.say(&[&RECEIVED, &LOADED]);
    lab.hears_nothing();
}

#[test]
fn standby_that_holds_what_it_has_not_got_is_at_fault() {
    let mut lab = lab_that_keeps(1 << 20, 0);
    lab.first_reply();
    lab.qemu.write_all(&checkpoint(0)[..100]).unwrap();
    lab.standby_reads(&checkpoint(0)[..100]);
    lab.say(&[&RECEIVED]);
    let ended = lab.step();
    assert!(ended.starts_with("ended, true: ") && ended.contains("has not received"), "{ended}");
}

#[test]
fn qemu_that_says_something_unknown_waits_for_the_standby_and_every_byte_arrives() {
    let mut lab = lab_that_keeps(1 << 20, 0);
    lab.first_reply();
    let unknown = [&checkpoint(0)[..9], &[0xff; 5000]].concat();
    lab.qemu.write_all(&unknown).unwrap();
    lab.standby_reads(&unknown);
    let why = lab.relay.waits_because().unwrap();
    assert!(why.contains("record"), "{why}");
    lab.say(&[&RECEIVED, &LOADED]);
    assert_eq!(lab.step(), "received 1");
    lab.go.send(true).unwrap();
    assert_eq!(read(&mut lab.qemu), RECEIVED_AND_LOADED);
}

#[test]
fn standby_gets_what_qemu_believes_held_before_qemus_end_is_told() {
    let mut lab = lab_that_keeps(1 << 20, 0);
    lab.first_reply();
    lab.qemu.write_all(&checkpoint(0)).unwrap();
    lab.is_answered(1);
    lab.qemu.shutdown(std::net::Shutdown::Both).unwrap();
    lab.standby_reads(&checkpoint(0));
    lab.no_step();
    lab.say(&[&RECEIVED, &LOADED]);
    assert_eq!(lab.step(), "ended, false: QEMU has closed the stream");
}

#[test]
fn guest_runs_on_when_the_standby_takes_nothing_and_the_checkpoint_fits() {
    // More than all socket buffers on the way can store.
    let mut lab = lab_that_keeps(64 << 20, 0);
    lab.first_reply();
    let page = [&[0, 0, 0, 0, 0, 0, 0x50, 0x28][..], &[7; 4096]].concat();
    let whole = checkpoint(0);
    // The position after the two pages that name the block.
    let at = 9 + 8 + 7 + 4096 + 8 + 4096;
    let large = [&whole[..at], &page.repeat(4000), &whole[at..]].concat();
    lab.qemu.write_all(&large).unwrap();
    lab.is_answered(1);
    assert!(lab.relay.kept_bytes() > 1 << 20, "{}", lab.relay.kept_bytes());
    assert!(lab.relay.stalled() > Duration::ZERO, "the standby takes nothing");
    lab.standby_reads(&large);
}
