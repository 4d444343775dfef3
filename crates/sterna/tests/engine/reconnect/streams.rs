//! Devices with large state: loaded parts of a stream stay valid, unless the device has stopped since.

use super::*;
use crate::common::{multifd, parameters};
use crate::support::bank::{Bank, Calls};
use crate::support::small;
use sterna_guests::process::ProcessGuest;

/// The value of the PING that announces streams from their beginning.
const ANEW: &[u8] = &[0x53, 0x54, 0x4e, 0x0b];

/// Two such devices: instance, seed, bytes of the stream. Two thirds can be read while the devices run.
pub(super) const BANKS: [(u32, u64, u64); 2] = [(0, 7, 12 << 20), (1, 8, 3 << 20)];

/// A migration of a guest with two such devices, and the devices' calls on each side.
pub(super) struct WithBanks {
    pub(super) bench: Bench,
    pub(super) calls: [Calls; 2],
}

impl WithBanks {
    pub(super) fn new(config: &ProcessConfig, settings: (Parameters, Capabilities), filter: Filter) -> Self {
        Self::counting(config, settings, [Calls::default(), Calls::default()], filter)
    }

    /// Starts with a guest that is paused at the source.
    fn paused(settings: (Parameters, Capabilities), filter: Filter) -> Self {
        let pair = common::pair(&small());
        pair.0.pause().unwrap();
        Self::of(pair, settings, [Calls::default(), Calls::default()], filter)
    }

    /// `calls` receives the calls of the source's devices and of the destination's.
    pub(super) fn counting(
        config: &ProcessConfig,
        settings: (Parameters, Capabilities),
        calls: [Calls; 2],
        filter: Filter,
    ) -> Self {
        Self::of(common::pair(config), settings, calls, filter)
    }

    fn of(
        (source, target): (Arc<ProcessGuest>, Arc<ProcessGuest>),
        settings: (Parameters, Capabilities),
        calls: [Calls; 2],
        filter: Filter,
    ) -> Self {
        let banks = BANKS.map(|(instance, seed, bytes)| {
            let bank = Bank::new(instance, seed, bytes, bytes / 3 * 2, &calls[0]);
            // On the main channel, no stream is read while the devices run.
            Arc::new(if settings.1.multifd { bank.read_while_running() } else { bank })
        });
        let waiting = banks.iter().map(|bank| Arc::new(bank.waiting(&calls[1]))).collect();
        let vms = (TestVm::with_banks(source, banks.to_vec()), TestVm::with_banks(target, waiting));
        let (params, capabilities) = settings;
        Self { bench: Bench::between(vms, (&params, &params), capabilities, filter), calls }
    }

    /// Number of these calls, for each device of a side.
    pub(super) fn count(&self, side: usize, call: &str) -> Vec<usize> {
        let calls = self.calls[side].lock().unwrap();
        [0, 1].map(|instance| calls.iter().filter(|told| **told == (instance, call)).count()).to_vec()
    }
}

/// Settings with a limited rate, so that a cut happens while the devices are read.
fn in_portions() -> (Parameters, Capabilities) {
    let (mut params, capabilities) = surviving(multifd(2));
    params.max_bandwidth_bytes = 40 << 20;
    // Less than a stream, so that chunks wait for room.
    params.max_queued_stream_bytes = 1 << 20;
    (params, capabilities)
}

#[test]
fn what_was_loaded_while_the_device_runs_stays() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let at = random.u64(1 << 20..3 << 20);
        let line = Line::Lane(random.u8(0..2));
        let verdict = *random.choice([&Verdict::Cut, &Verdict::CutThis]).unwrap();
        let filter = after_bytes(at, (line, Way::Forward), verdict, 3);
        let with = WithBanks::new(&config(), in_portions(), filter);
        let again = with.bench.arrives();
        assert!(again >= 2, "{again} at {at}");
        assert_eq!(with.count(0, "begin_save"), [1, 1], "they were read once");
        assert_eq!((with.count(1, "begin_load"), with.count(1, "end_load")), (vec![1, 1], vec![0, 0]));
        let streams = with.bench.migration.statistics().streams;
        assert_eq!(streams.iter().map(|stream| stream.bytes).collect::<Vec<_>>(), [12 << 20, 3 << 20]);
    }
}

#[test]
fn stream_of_a_device_that_had_stopped_begins_anew() {
    for (way, including) in [(Way::Forward, false), (Way::Forward, true), (Way::Back, false)] {
        let filter = at_words(way, including, &[PREPARE]);
        let with = WithBanks::new(&small(), surviving(multifd(2)), filter);
        assert_eq!(with.bench.arrives(), 1);
        assert_eq!(with.count(0, "begin_save"), [2, 2]);
        assert_eq!(with.count(0, "end_save"), [2, 2]);
        assert_eq!((with.count(1, "begin_load"), with.count(1, "end_load")), (vec![2, 2], vec![1, 1]));
    }
}

/// The guest does not run between the two switchovers, so its devices stay stopped.
#[test]
fn devices_of_a_paused_guest_are_read_again_after_a_lost_answer_to_prepare() {
    let filter = at_words(Way::Back, false, &[PREPARE]);
    let with = WithBanks::paused(surviving(multifd(2)), filter);
    let (outcome, arrival) = (with.bench.migration.wait(), with.bench.incoming.wait());
    assert!(matches!(outcome, sterna::Outcome::Completed), "{outcome:?}");
    let is_paused = matches!(arrival, sterna::Arrival::Completed(sterna::RunState::Paused));
    assert!(is_paused, "{arrival:?}");
    assert_eq!((with.count(0, "begin_save"), with.count(0, "stop")), (vec![2, 2], vec![2, 2]));
    assert_eq!((with.count(0, "run"), with.count(1, "run")), (vec![0, 0], vec![0, 0]));
    assert_eq!(*with.bench.source.resumes.lock().unwrap(), 0);
}

#[test]
fn streams_begin_anew_though_the_destination_did_not_hear_it_at_first() {
    let filter = at_words(Way::Forward, false, &[PREPARE, ANEW]);
    let with = WithBanks::new(&small(), surviving(multifd(2)), filter);
    assert_eq!(with.bench.arrives(), 2);
    assert_eq!(with.count(0, "begin_save"), [3, 3]);
}

#[test]
fn device_with_a_stream_on_the_main_channel_is_named_and_a_lost_connection_ends_the_migration() {
    let filter = at_words(Way::Forward, true, &[PREPARE]);
    let settings = surviving((parameters(), Capabilities::default()));
    let WithBanks { bench, .. } = WithBanks::new(&small(), settings, filter);
    let (outcome, arrival) = (bench.migration.wait(), bench.incoming.wait());
    crate::support::assert_failed(&outcome, &arrival, &bench.source, &bench.target);
    let told = bench.told.events();
    assert!(crate::support::has_warning(&told, &["has no effect", "bank"]), "{told:?}");
}

#[test]
fn devices_stop_saving_where_no_other_connection_comes() {
    let filter: Filter = Box::new(|_, _, _, _| Verdict::Pass);
    let (mut params, capabilities) = in_portions();
    params.max_bandwidth_bytes = 4 << 20;
    params.reconnect_window = Duration::from_millis(300);
    let with = WithBanks::new(&config(), (params, capabilities), filter);
    let bench = &with.bench;
    crate::support::eventually("chunks", || with.count(1, "write").iter().all(|count| *count > 0));
    bench.proxy.refuse(true);
    bench.proxy.cut();
    let outcome = bench.migration.wait();
    assert!(matches!(outcome, sterna::Outcome::Failed { held: false, .. }), "{outcome:?}");
    assert_eq!(with.count(0, "end_save"), [1, 1]);
    common::assert_lives_on(&bench.source.guest);
}
