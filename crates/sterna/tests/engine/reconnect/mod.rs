//! Connections that are lost before the commit and replaced: the guest arrives complete, and few bytes are sent
//! twice.

mod chunks;
mod cuts;
mod ends;
mod preempt;
mod silence;
mod strangers;
mod streams;
mod switchover;
mod zeros;

use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, Log};
use crate::support::proxy::{Filter, Line, Proxy, Verdict, Way};
use crate::support::{TestVm, vm};
use sterna::{Capabilities, Event, Incoming, Migration, Parameters, WaitLimits};
use sterna_guests::model::{Acts, Fill};
use sterna_guests::process::ProcessConfig;

/// Longer than any test.
const WINDOW: Duration = Duration::from_secs(60);

/// A guest that writes and zeroes pages, and is large enough to be cut in the middle.
fn config() -> ProcessConfig {
    let acts = Acts::MIXED;
    ProcessConfig { fill: Fill::Random(3), acts, working_set_pages: Some(200), ..common::config() }
}

/// The same settings, with a reconnect window.
fn surviving((params, capabilities): (Parameters, Capabilities)) -> (Parameters, Capabilities) {
    (Parameters { reconnect_window: WINDOW, ..params }, capabilities)
}

/// A migration through a proxy that disturbs it.
struct Bench {
    source: Arc<TestVm>,
    target: Arc<TestVm>,
    proxy: Proxy,
    migration: Migration,
    incoming: Incoming,
    told: Arc<Log>,
}

impl Bench {
    fn new(
        config: &ProcessConfig,
        (params, capabilities): (Parameters, Capabilities),
        filter: Filter,
    ) -> Self {
        let (source, target) = common::pair(config);
        Self::between((TestVm::new(source), TestVm::new(target)), (&params, &params), capabilities, filter)
    }

    fn between(
        (source, target): (Arc<TestVm>, Arc<TestVm>),
        (here, there): (&Parameters, &Parameters),
        capabilities: Capabilities,
        filter: Filter,
    ) -> Self {
        let incoming = vm::listen(&target, there, capabilities);
        let proxy = Proxy::new(&incoming.address(), filter);
        let told = Arc::new(Log::default());
        let migration = vm::start(&source, &proxy.address(), here, capabilities, told.clone());
        Self { source, target, proxy, migration, incoming, told }
    }

    /// Asserts that the guest has arrived complete. Returns how often a connection was replaced.
    fn arrives(&self) -> usize {
        let (outcome, arrival) = (self.migration.wait(), self.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target.guest);
        let reconnections = self.migration.statistics().reconnections;
        let told = self.told.events();
        let again = told.iter().filter(|event| matches!(event, Event::Reconnected { .. })).count();
        assert_eq!(again, reconnections.len(), "{told:?}");
        reconnections.len()
    }
}

/// Acts once, on the first piece of this connection and direction after at least `at` bytes have been sent to the
/// destination. The bytes count over all connections together. Repeats that up to `times`.
fn after_bytes(at: u64, (line, way): (Line, Way), verdict: Verdict, times: usize) -> Filter {
    let (mut passed, mut next, mut left) = (0, at, times);
    Box::new(move |this, going, _, piece| {
        if going == Way::Forward {
            passed += piece.len() as u64;
        }
        if left == 0 || passed < next || this != line || going != way {
            return Verdict::Pass;
        }
        left -= 1;
        next = passed + at;
        // In the middle of the bytes that were written in one call.
        piece.truncate(piece.len().div_ceil(2));
        verdict
    })
}

/// The value of PING *prepare*.
const PREPARE: &[u8] = &[0x53, 0x54, 0x4e, 0x03];

/// Cuts all connections where the first of these words passes on the main channel, then where the second does, and so
/// on: after the word, or before its last byte.
fn at_words(way: Way, including: bool, words: &'static [&'static [u8]]) -> Filter {
    let (mut last, mut words) = (Vec::new(), words.iter());
    let mut next = words.next();
    Box::new(move |line, going, offset, piece| {
        let Some(word) = next.filter(|_| line == Line::Main && going == way) else { return Verdict::Pass };
        if offset == 0 {
            last.clear();
        }
        let known = last.len();
        last.extend_from_slice(piece);
        let Some(at) = last.windows(word.len()).position(|window| window == *word) else {
            last.drain(..last.len().saturating_sub(word.len() - 1));
            return Verdict::Pass;
        };
        next = words.next();
        let end = at + word.len() - usize::from(!including);
        piece.truncate(end.saturating_sub(known));
        last.clear();
        Verdict::Cut
    })
}

/// Limits with which silence is detected soon.
fn impatient(params: Parameters) -> Parameters {
    let limits = WaitLimits { stall: Duration::from_secs(1), ..params.limits };
    Parameters { limits, ..params }
}
