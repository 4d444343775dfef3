//! Adapters with on-demand paging, on one side or on both: no guest memory is pinned there.

use super::content::{PAGES_OF_MIB, finish, ram, resident, start};
use super::pinned::of_messages;
use super::*;
use crate::plain::{Plain, byte_of};
use crate::support::warnings;
use sterna::ram::Backing;
use sterna_transport::rdma::double::{Fault, Trigger};

/// Source and destination.
type Sides = [bool; 2];

const BOTH: Sides = [true, true];
const ALL: [Sides; 3] = [BOTH, [true, false], [false, true]];
const BLOCKS: u64 = 2;
const EOPNOTSUPP: i32 = 95;

fn lab(settings: Settings, has: Sides) -> Lab {
    let lab = Lab::new(settings);
    for (host, has) in [&lab.source_host, &lab.destination].into_iter().zip(has) {
        lab.network.set_on_demand_paging(host, has);
    }
    lab
}

/// Settings of a migration.
#[derive(Debug, Clone, Copy, Default)]
struct Setup {
    lanes: u8,
    pin_all: bool,
    limit: Option<u64>,
}

impl Setup {
    fn start(&self, lab: &Lab, config: &ProcessConfig) -> Run {
        let capabilities =
            Capabilities { multifd: self.lanes > 0, rdma_pin_all: self.pin_all, ..Capabilities::default() };
        lab.start(config, capabilities, |params| {
            params.multifd_channels = self.lanes.max(1);
            params.rdma.pinned_limit_bytes = self.limit;
            params.downtime_limit = Duration::ZERO;
        })
    }
}

/// Results of a migration.
struct Played {
    statistics: Statistics,
    /// Registrations of guest memory at the destination.
    registered_there: u64,
    /// Warnings of source and destination.
    warned: [Vec<String>; 2],
}

/// Runs rounds in which the guest writes, then the switchover.
fn play(lab: &Lab, run: Run) -> Played {
    while run.migration.statistics().rounds_begun < 3 && run.migration.outcome().is_none() {
        let pins = run.migration.statistics().rdma.unwrap_or_default();
        let has = [&lab.source_host, &lab.destination].map(|host| has_guest_on_demand(lab, host));
        assert!(!has[0] || pins.pinned_bytes == 0, "{pins:?}");
        assert!(!has[1] || pins.destination_pinned_bytes == 0, "{pins:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    let (statistics, run) = run.finish(Duration::ZERO);
    let warned = run.logs.each_ref().map(|log| warnings(&log.events()));
    let registered_there = run.incoming.statistics().rdma.unwrap().registrations;
    drop(run);
    lab.assert_empty();
    Played { statistics, registered_there, warned }
}

fn has_guest_on_demand(lab: &Lab, host: &Host) -> bool {
    lab.network.counts_of(host).registrations_failed == 0
        && host.adapters().unwrap().iter().all(|adapter| adapter.on_demand_paging)
}

fn most_pinned(lab: &Lab) -> [u64; 2] {
    [&lab.source_host, &lab.destination].map(|host| lab.network.counts_of(host).pinned_bytes_most)
}

#[test]
fn guest_moves_and_nothing_of_it_is_pinned_where_the_adapter_follows_memory() {
    const LIMIT: u64 = 4 * MIB;
    let mut seed = 70;
    for lanes in [0, 2] {
        let of_messages = of_messages(lanes);
        for has in ALL {
            // A limit has no effect on a side that pins nothing; the other side's limit still applies.
            for (pin_all, limit) in [(false, None), (false, Some(LIMIT)), (true, None)] {
                seed += 1;
                let setup = Setup { lanes, pin_all, limit };
                let what = format!("on demand at {has:?}, {setup:?}, seed {seed}");
                println!("{what}");
                let lab = lab(Settings::seeded(seed), has);
                let run = setup.start(&lab, &ProcessConfig { seed, ..writer(5_000) });

                let Played { statistics, registered_there, warned } = play(&lab, run);

                assert_eq!(warned.concat(), Vec::<String>::new(), "{what}");
                let rdma = statistics.rdma.unwrap();
                let most = most_pinned(&lab);
                for side in 0..2 {
                    let of_guest = most[side] - of_messages[side];
                    match limit {
                        _ if has[side] => assert_eq!(of_guest, 0, "{what}"),
                        Some(limit) => assert!((1..=limit).contains(&of_guest), "{what}: {of_guest}"),
                        None => assert!(of_guest > 0, "{what}"),
                    }
                }
                // Each block is registered once, and the registration is used again in later rounds.
                assert!(!has[0] || rdma.registrations == BLOCKS, "{what}: {rdma:?}");
                assert!(!has[1] || registered_there == BLOCKS, "{what}: {registered_there}");
                assert_eq!(rdma.windows == 0, has[1] || pin_all, "{what}: {rdma:?}");
                assert!(statistics.rounds_begun >= 3 && rdma.written_bytes > 0, "{what}");
            }
        }
    }
}

/// The process may lock only the memory for the messages.
#[test]
fn locked_memory_limit_does_not_bind_where_nothing_is_pinned() {
    for lanes in [0, 2] {
        let of_messages = of_messages(lanes);
        let mut settings = Settings::seeded(81);
        settings.locked_memory_bytes = Some(of_messages[0].max(of_messages[1]));
        for pin_all in [false, true] {
            let lab = lab(settings.clone(), BOTH);
            let run = Setup { lanes, pin_all, limit: None }.start(&lab, &writer(5_000));

            let Played { warned, .. } = play(&lab, run);

            assert_eq!(warned.concat(), Vec::<String>::new());
        }
    }
}

/// Windows of 1 MiB would populate all of the destination's memory.
#[test]
fn sparse_guest_stays_sparse_where_every_window_holds_a_page() {
    const GUEST_MIB: u64 = 512;
    for backing in [Backing::Memfd, Backing::Anonymous] {
        for lanes in [0, 2] {
            let lab = lab(Settings::new(), BOTH);
            let [source, target] = [(); 2].map(|()| Plain::new(ram(GUEST_MIB, backing)));
            let page_of = |mib: u64| mib * PAGES_OF_MIB + mib % PAGES_OF_MIB;
            (0..GUEST_MIB).for_each(|mib| source.write(page_of(mib), 1 + (mib % 200) as u8));

            let (migration, incoming) = start(&lab, &source, &target, lanes);
            let statistics = finish(migration, incoming);

            let resident = [resident(&source), resident(&target)];
            let what = format!("{backing:?}, {lanes} lanes: {resident:?} bytes resident");
            assert!(resident.iter().all(|bytes| *bytes < 16 * MIB), "{what}");
            assert_eq!(statistics.rdma.unwrap().written_bytes, GUEST_MIB * 4096, "{what}");
            let is_same = |mib| byte_of(&target.ram, page_of(mib)) == 1 + (mib % 200) as u8;
            assert!((0..GUEST_MIB).all(is_same), "{what}");
            drop((source, target));
            lab.assert_empty();
        }
    }
}

#[test]
fn memory_that_became_zero_is_given_back_under_the_registration_and_written_again() {
    const GUEST_MIB: u64 = 64;
    for lanes in [0, 2] {
        let lab = lab(Settings::new(), BOTH);
        let [source, target] = [(); 2].map(|()| Plain::new(ram(GUEST_MIB, Backing::Memfd)));
        let pages = GUEST_MIB * PAGES_OF_MIB;
        (0..pages).for_each(|page| source.write(page, 7));
        // When all memory was sent.
        source.at_last(move |guest| {
            (0..pages).for_each(|page| guest.write(page, u8::from(page % 1024 == 5)));
        });

        let (migration, incoming) = start(&lab, &source, &target, lanes);
        finish(migration, incoming);

        // Measured before memory is read, because reading populates it.
        let resident = resident(&target);
        assert!((0..pages).all(|page| byte_of(&target.ram, page) == u8::from(page % 1024 == 5)));
        // A packet contains too few pages for giving memory back.
        assert!(lanes > 0 || resident < GUEST_MIB / 4 * MIB, "{resident} bytes are resident");
        drop((source, target));
        lab.assert_empty();
    }
}

#[test]
fn adapter_that_announces_on_demand_paging_and_refuses_it_pins_windows_below_the_limit() {
    const LIMIT: u64 = 4 * MIB;
    let setup = Setup { limit: Some(LIMIT), ..Setup::default() };
    for lanes in [0, 2] {
        let of_messages = of_messages(lanes);
        for pin_all in [false, true] {
            let setup = Setup { lanes, pin_all, ..setup };
            let made = {
                let lab = lab(Settings::new(), BOTH);
                let run = setup.start(&lab, &writer(5_000));
                play(&lab, run);
                [&lab.source_host, &lab.destination]
                    .map(|host| lab.network.counts_of(host).registrations_made)
            };
            for (side, block) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let what = format!("refused at side {side}, block {block}, {setup:?}");
                println!("{what}");
                let lab = lab(Settings::seeded(83), BOTH);
                let host = [&lab.source_host, &lab.destination][side];
                // After the registrations for messages.
                let nth = made[side] - BLOCKS + 1 + block;
                lab.network.plan(host, Trigger::Registration(nth), Fault::Errno(EOPNOTSUPP));
                let run = setup.start(&lab, &writer(5_000));

                let Played { statistics, warned, .. } = play(&lab, run);

                assert_eq!(warned[1 - side], Vec::<String>::new(), "{what}");
                let words = ["cannot be registered on demand", "os error 95", "x-sterna-rdma-pinned-limit"];
                let text = warned[side].join("\n");
                assert!(
                    warned[side].len() == 1 && words.iter().all(|word| text.contains(word)),
                    "{what}: {text}"
                );
                let of_guest = most_pinned(&lab)[side] - of_messages[side];
                assert!((1..=LIMIT).contains(&of_guest), "{what}: {of_guest}");
                assert_eq!(statistics.rdma.unwrap().windows > 0, side == 1, "{what}");
            }
        }
    }
}
