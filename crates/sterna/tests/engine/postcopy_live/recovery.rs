//! A connection that breaks after RUN, and a new one that replaces it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketType};
use sterna::{
    Address, Capabilities, Compression, Decision, Incoming, Migration, Parameters, RecoverError, ResumeError,
    SettingsError, Status, TargetVm, Tls, TlsCredentials, TlsEndpoint, Vm,
};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_proto::destination;
use sterna_proto::source::Refusal;

use super::{capabilities, config, slow};
use crate::common::{self, Log};
use crate::support::{eventually, has_warning, port, until_status};

/// A network between the two sides, which tests can interrupt.
pub(super) struct Cable {
    pub(super) at: Address,
    open: Arc<Mutex<Vec<TcpStream>>>,
    is_down: Arc<Mutex<bool>>,
    /// Whether the source's bytes on its main channel are withheld.
    holds_main: Arc<AtomicBool>,
}

impl Cable {
    pub(super) fn to(address: &Address) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let (open, is_down) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(false)));
        let (streams, down, to) = (Arc::clone(&open), Arc::clone(&is_down), port(address));
        let holds_main = Arc::new(AtomicBool::new(false));
        let holds = Arc::clone(&holds_main);
        std::thread::spawn(move || {
            // The main channel connects first.
            for (index, near) in listener.incoming().enumerate() {
                let Ok(near) = near else { return };
                if *down.lock() {
                    continue;
                }
                let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                for (from, to, is_from_source) in [(&near, &far, true), (&far, &near, false)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let holds = Arc::clone(&holds);
                    std::thread::spawn(move || {
                        let mut piece = [0; 16 << 10];
                        while let Ok(count @ 1..) = from.read(&mut piece) {
                            while index == 0 && is_from_source && holds.load(Ordering::Acquire) {
                                std::thread::sleep(Duration::from_millis(1));
                            }
                            if to.write_all(&piece[..count]).is_err() {
                                break;
                            }
                        }
                        if !(is_from_source && holds.load(Ordering::Acquire)) {
                            let _ = to.shutdown(Shutdown::Write);
                        }
                    });
                }
                streams.lock().extend([near, far]);
            }
        });
        Self { at, open, is_down, holds_main }
    }

    /// Closes all connections. Bytes in transit are lost.
    pub(super) fn cut(&self) {
        self.open.lock().drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
        self.holds_main.store(false, Ordering::Release);
    }

    /// The source notices the loss of its connection. The destination does not, while the source's bytes are
    /// withheld.
    pub(super) fn cut_for_source(&self) {
        self.open.lock().iter().step_by(2).for_each(|near| drop(near.shutdown(Shutdown::Both)));
    }

    /// From now on, withholds the source's bytes on its main channel, and the closing of its connections. Everything
    /// else is forwarded.
    pub(super) fn hold_main(&self) {
        self.holds_main.store(true, Ordering::Release);
    }

    /// From now on rejects all connections, or accepts all.
    pub(super) fn set_down(&self, down: bool) {
        *self.is_down.lock() = down;
        self.cut();
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.cut();
    }
}

/// A guest that runs at its destination and lacks most of its pages.
pub(super) struct Split {
    pub(super) source: Arc<ProcessGuest>,
    pub(super) target: Arc<ProcessGuest>,
    pub(super) incoming: Incoming,
    pub(super) migration: Migration,
    pub(super) cable: Cable,
    logs: [Arc<Log>; 2],
}

/// A guest whose pages are sent slowly, with few equal pages.
pub(super) fn guest() -> ProcessConfig {
    ProcessConfig { fill: Fill::Random(7), ..config() }
}

pub(super) fn trickle() -> Parameters {
    Parameters { max_postcopy_bandwidth_bytes: 8 << 20, ..slow() }
}

impl Split {
    pub(super) fn begin(ours: Parameters, theirs: Parameters, capabilities: Capabilities) -> Self {
        Self::of(&guest(), ours, theirs, capabilities)
    }

    pub(super) fn of(
        guest: &ProcessConfig,
        ours: Parameters,
        theirs: Parameters,
        capabilities: Capabilities,
    ) -> Self {
        Self::copying(guest, ours, theirs, capabilities).switched()
    }

    /// Starts a migration that stays in precopy.
    fn copying(
        guest: &ProcessConfig,
        ours: Parameters,
        theirs: Parameters,
        capabilities: Capabilities,
    ) -> Self {
        let (source, target) = common::pair(guest);
        let logs = [Arc::new(Log::default()), Arc::new(Log::default())];
        let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming = Incoming::listen(vm, &at, theirs, capabilities, logs[1].clone()).unwrap();
        let cable = Cable::to(&incoming.address());
        let migration = common::start(&source, &cable.at, &ours, capabilities, logs[0].clone());
        Self { source, target, incoming, migration, cable, logs }
    }

    fn switched(self) -> Self {
        self.migration.start_postcopy().unwrap();
        until_status(&self.migration, Status::PostcopyActive);
        self.after_pages(200);
        self
    }

    pub(super) fn plain(preempt: bool) -> Option<Self> {
        capabilities(preempt).map(|on| Self::begin(trickle(), trickle(), on))
    }

    /// Waits until this number of pages has followed the guest.
    pub(super) fn after_pages(&self, pages: u64) {
        let before = self.left();
        eventually("pages", || self.left() + pages <= before);
    }

    pub(super) fn left(&self) -> u64 {
        self.incoming.statistics().postcopy.map_or(u64::MAX / 2, |postcopy| postcopy.missing_pages)
    }

    pub(super) fn paused(&self) {
        until_status(&self.migration, Status::PostcopyPaused);
        eventually("the pause", || self.incoming.status() == Status::PostcopyPaused);
        assert!(self.left() > 0, "pages are missing");
    }

    pub(super) fn resume(&self) {
        self.migration.resume(&self.cable.at).unwrap();
    }

    /// Waits for both ends, and checks every page where the guest arrived.
    pub(super) fn arrives(self) -> Self {
        self.migration.set_live(|params| params.max_postcopy_bandwidth_bytes = 0).unwrap();
        let (outcome, arrival) = (self.migration.wait(), self.incoming.wait());
        common::assert_arrived(&outcome, &arrival, &self.target);
        assert!(!self.migration.may_guest_run(), "it has left for good");
        let postcopy = self.incoming.statistics().postcopy.unwrap();
        assert_eq!(postcopy.missing_pages, 0);
        self
    }

    pub(super) fn told(&self, side: usize) -> Vec<Status> {
        let status = |event: &sterna::Event| match event {
            sterna::Event::Status(status) => Some(*status),
            _ => None,
        };
        self.logs[side].events().iter().filter_map(status).collect()
    }

    pub(super) fn warned(&self, side: usize, word: &str) -> bool {
        has_warning(&self.logs[side].events(), &[word])
    }
}

#[test]
fn guest_goes_on_after_a_loss_with_every_page() {
    for preempt in [false, true] {
        let Some(split) = Split::plain(preempt) else { return };
        split.cable.cut();
        split.paused();
        // Writers touch missing pages meanwhile: they wait, and their requests are sent after the loss.
        std::thread::sleep(Duration::from_millis(100));
        let before = split.incoming.statistics().postcopy.unwrap().requests;
        split.resume();
        let split = split.arrives();
        let after = split.incoming.statistics().postcopy.unwrap().requests;
        assert!(after > before, "what was waited for was asked for again");
        assert!(split.migration.statistics().error.is_none());
        let once = [
            Status::PostcopyActive,
            Status::PostcopyPaused,
            Status::PostcopyRecover,
            Status::PostcopyActive,
            Status::Completed,
        ];
        for side in [0, 1] {
            let told = split.told(side);
            assert!(told.ends_with(&once), "{told:?}");
        }
    }
}

#[test]
fn guest_goes_on_after_two_losses_in_a_row() {
    for preempt in [false, true] {
        let Some(split) = Split::plain(preempt) else { return };
        for _ in 0..2 {
            split.cable.cut();
            split.paused();
            split.resume();
            until_status(&split.migration, Status::PostcopyActive);
            split.after_pages(100);
        }
        split.arrives();
    }
}

/// Pages that lanes had claimed, and that were in transit, are sent over the other channels.
#[test]
fn guest_goes_on_after_a_loss_with_lanes_and_has_every_page() {
    for preempt in [false, true] {
        let Some(on) = capabilities(preempt) else { return };
        let on = Capabilities { multifd: true, ..on };
        let params = Parameters { multifd_channels: 2, ..trickle() };
        let split = Split::begin(params.clone(), params, on);
        for _ in 0..2 {
            split.cable.cut();
            split.paused();
            split.resume();
            until_status(&split.migration, Status::PostcopyActive);
            let over_lanes = split.migration.statistics().multifd_bytes;
            split.after_pages(100);
            assert_eq!(split.migration.statistics().multifd_bytes, over_lanes, "no lane is left");
        }
        split.arrives();
    }
}

#[test]
fn guest_goes_on_by_itself_within_the_window() {
    let Some(on) = capabilities(true) else { return };
    let params = Parameters { reconnect_window: Duration::from_secs(60), ..trickle() };
    let split = Split::begin(params.clone(), params, on);
    split.cable.set_down(true);
    split.paused();
    std::thread::sleep(Duration::from_millis(600));
    split.cable.set_down(false);
    split.arrives();
}

/// A connection that is lost and replaced in precopy, and lost twice more after RUN.
#[test]
fn guest_whose_connections_broke_in_precopy_and_in_postcopy_has_every_page() {
    for (preempt, multifd) in [(false, false), (true, false), (false, true), (true, true)] {
        let Some(on) = capabilities(preempt) else { return };
        let on = Capabilities { multifd, ..on };
        let window = Duration::from_secs(60);
        let params = Parameters { multifd_channels: 2, reconnect_window: window, ..trickle() };
        let split = Split::copying(&guest(), params.clone(), params, on);
        for times in 1..=2 {
            let sent = split.migration.statistics().transferred_bytes;
            eventually("pages", || split.migration.statistics().transferred_bytes > sent + (1 << 20));
            split.cable.cut();
            eventually("a new session", || split.migration.statistics().reconnections.len() == times);
        }
        let split = split.switched();
        for _ in 0..2 {
            split.cable.cut();
            eventually("the loss", || split.left() > 0 && split.incoming.status() != Status::PostcopyActive);
            until_status(&split.migration, Status::PostcopyActive);
            eventually("pages again", || split.incoming.status() == Status::PostcopyActive);
            split.after_pages(100);
        }
        split.arrives();
    }
}

#[test]
fn guest_goes_on_at_another_address() {
    let Some(split) = Split::plain(true) else { return };
    let early = split.incoming.recover_at(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap_err();
    let is_early = matches!(early, RecoverError::Refused(destination::Refusal::NotPostcopyPaused { .. }));
    assert!(is_early, "{early}");
    split.cable.set_down(true);
    split.paused();
    let file = split.incoming.recover_at(&"file:/nowhere".parse().unwrap()).unwrap_err();
    assert!(matches!(file, RecoverError::Settings(SettingsError::NoWayToRecover)), "{file}");
    split.incoming.recover_at(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let other = split.incoming.address();
    assert_ne!(port(&other), port(&split.cable.at));
    split.migration.resume(&other).unwrap();
    split.arrives();
}

/// Compressed pages that were in transit over lanes are sent again over the main channel, uncompressed.
#[test]
fn guest_goes_on_over_tls_whether_lanes_compressed_or_not() {
    let Some(on) = capabilities(true) else { return };
    let certificates = crate::certificates::good_directory();
    for compression in [None, Some(Compression::None), Some(Compression::Zstd), Some(Compression::Zlib)] {
        let with = |endpoint| {
            let credentials = TlsCredentials::from_directory(certificates.path(), endpoint, false).unwrap();
            Parameters {
                tls: Some(Tls::new(Arc::new(credentials))),
                multifd_channels: 2,
                multifd_compression: compression.unwrap_or_default(),
                ..trickle()
            }
        };
        let on = Capabilities { multifd: compression.is_some(), ..on };
        let split = Split::begin(with(TlsEndpoint::Client), with(TlsEndpoint::Server), on);
        split.cable.cut();
        split.paused();
        split.resume();
        split.arrives();
    }
}

#[test]
fn wrong_time_and_wrong_address_are_refused_and_change_nothing() {
    let Some(on) = capabilities(false) else { return };
    // Time for which the source tries to reach a destination.
    let limits = sterna::WaitLimits { setup: Duration::from_secs(2), ..common::LIMITS };
    let params = Parameters { limits, ..trickle() };
    let split = Split::begin(params.clone(), params, on);
    let early = split.migration.resume(&split.cable.at).unwrap_err();
    assert!(matches!(early, ResumeError::Refused(Refusal::NotPostcopyPaused { .. })), "{early}");
    split.cable.cut();
    split.paused();
    let file = split.migration.resume(&"file:/nowhere".parse().unwrap()).unwrap_err();
    assert!(matches!(file, ResumeError::Settings(_)), "{file}");
    // No destination listens there. The socket keeps the port, which another test could use otherwise.
    let nobody = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&nobody, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let taken = std::net::SocketAddr::try_from(rustix::net::getsockname(&nobody).unwrap()).unwrap();
    let address = format!("tcp:{taken}").parse().unwrap();
    split.migration.resume(&address).unwrap();
    eventually("the attempt", || split.told(0).contains(&Status::PostcopyRecover));
    until_status(&split.migration, Status::PostcopyPaused);
    assert!(split.migration.statistics().error.is_some());
    assert!(split.migration.decide(Decision::SourceRuns).is_err(), "it has run there");
    assert!(!split.source.ram().custody().may_run());
    split.resume();
    split.arrives();
}

#[test]
fn destination_of_another_guest_is_no_way_to_go_on() {
    let Some(split) = Split::plain(false) else { return };
    let Some(other) = Split::plain(false) else { return };
    split.cable.cut();
    other.cable.cut();
    split.paused();
    other.paused();
    split.migration.resume(&other.cable.at).unwrap();
    eventually("the refusal", || other.warned(1, "whose secret this side does not know"));
    until_status(&split.migration, Status::PostcopyPaused);
    split.resume();
    other.resume();
    split.arrives();
    other.arrives();
}

#[test]
fn stranger_who_wants_to_go_on_gets_no_byte_and_changes_nothing() {
    let Some(split) = Split::plain(false) else { return };
    split.cable.cut();
    split.paused();
    let at = port(&split.incoming.address());
    // The form of a QEMU, and a hello without proof.
    let hello = [&b"STNS\0\0\0\x01"[..], &[7; 16], &[0, 0, 0, 9, 0xff, 0xff, 0xff, 0xfe], &[1; 48]].concat();
    for bytes in [&b"\x08\0\x0a\0\x08\x07ram.low"[..], &hello] {
        let mut stranger = TcpStream::connect(("127.0.0.1", at)).unwrap();
        stranger.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stranger.write_all(bytes).unwrap();
        let mut heard = Vec::new();
        let _ = stranger.read_to_end(&mut heard);
        assert!(heard.is_empty(), "{heard:?}");
    }
    assert_eq!(split.incoming.status(), Status::PostcopyPaused);
    split.resume();
    split.arrives();
}
