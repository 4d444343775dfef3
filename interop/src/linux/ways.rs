//! The ways in which a guest moves from one machine to another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{
    Arrival, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm,
};
use sterna_transport::TlsEndpoint;
use sterna_vmm::KvmMachine;

use super::files::Files;
use super::said;
use crate::certificates;
use crate::scenarios::{Failure, ensure};

/// How a guest moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Plain,
    Multifd,
    Zstd,
    /// Over several channels, each of which is encrypted.
    Tls,
    /// Into a mapped-ram image, and out of it.
    MappedRam,
    /// Into a legacy stream in a file, and out of it.
    File,
}

impl Way {
    /// All ways, in the order of their use.
    pub(super) const ALL: [Self; 6] =
        [Self::Plain, Self::Multifd, Self::MappedRam, Self::Tls, Self::Zstd, Self::File];

    /// The ways in which both sides exist at the same time.
    pub(super) const OVER_SOCKETS: [Self; 2] = [Self::Plain, Self::Multifd];

    /// Parameters and capabilities of one side.
    pub(super) fn parameters(self, side: TlsEndpoint) -> Result<(Parameters, Capabilities), Failure> {
        let multifd_compression = if self == Self::Zstd { Compression::Zstd } else { Compression::None };
        let tls =
            (self == Self::Tls).then(|| certificates::of(&Files::new()?.certificates(), side)).transpose()?;
        let mut params =
            Parameters { multifd_channels: 2, multifd_compression, tls, ..Parameters::default() };
        if self == Self::Plain {
            // A disk that is copied is sent completely in the pause.
            params.downtime_limit = Duration::from_secs(1);
        }
        let capabilities = Capabilities {
            return_path: !self.is_file(),
            multifd: !matches!(self, Self::Plain | Self::File),
            mapped_ram: self == Self::MappedRam,
            // Enabled as an operator would: on a busy host, a guest that writes all the time may not
            // converge.
            auto_converge: true,
            ..Capabilities::default()
        };
        Ok((params, capabilities))
    }

    pub(super) fn is_file(self) -> bool {
        matches!(self, Self::MappedRam | Self::File)
    }
}

/// Measurements of a move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    /// Total time, on both sides.
    pub(super) total: Duration,
    rounds: u64,
    pub(super) sent_bytes: u64,
    /// Bytes that were not sent because the guest reported them as free.
    pub(super) free_bytes: u64,
    /// The guest's downtime. For moves through a file, the total time counts.
    pub(super) pause: Duration,
}

impl std::fmt::Display for Moved {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { total, rounds, sent_bytes, pause, .. } = self;
        let (total, pause) = (total.as_secs_f64(), pause.as_secs_f64());
        write!(to, "{total:.1} s, pause {pause:.2} s, {rounds} rounds, {} MiB", sent_bytes >> 20)
    }
}

/// Moves the guest, and waits until it runs at the destination.
pub(super) fn move_guest(from: &Arc<KvmMachine>, to: &Arc<KvmMachine>, way: Way) -> Result<Moved, Failure> {
    move_with_rest(from, to, way, || Ok(()))
}

/// Like [`move_guest`]. If the guest moves through a file, calls `rest` while the guest is only in the file.
pub(super) fn move_with_rest(
    from: &Arc<KvmMachine>,
    to: &Arc<KvmMachine>,
    way: Way,
    rest: impl FnOnce() -> Result<(), Failure>,
) -> Result<Moved, Failure> {
    let begin = Instant::now();
    let directory = tempfile::tempdir().map_err(said)?;
    let path = directory.path().join("s");
    let scheme = if way.is_file() { "file" } else { "unix" };
    let address = format!("{scheme}:{}", path.display()).parse().map_err(said)?;
    let receive = || {
        let (params, capabilities) = way.parameters(TlsEndpoint::Server)?;
        let to: Arc<dyn TargetVm> = Arc::clone(to) as _;
        Incoming::listen(to, &address, params, capabilities, Arc::new(())).map_err(said)
    };
    let send = || {
        let (params, capabilities) = way.parameters(TlsEndpoint::Client)?;
        let from: Arc<dyn SourceVm> = Arc::clone(from) as _;
        let migration = Migration::start(from, &address, params, capabilities, Arc::new(()));
        let migration = migration.map_err(said)?;
        let outcome = migration.wait();
        ensure(matches!(outcome, Outcome::Completed), || format!("{outcome:?}"))?;
        Ok::<_, Failure>(migration.statistics())
    };
    let (incoming, sent) = if way.is_file() {
        let sent = send()?;
        rest()?;
        (receive()?, sent)
    } else {
        let incoming = receive()?;
        (incoming, send()?)
    };
    let arrival = incoming.wait();
    ensure(matches!(arrival, Arrival::Completed(_)), || format!("{arrival:?}"))?;
    let total = begin.elapsed();
    Ok(Moved {
        total,
        rounds: sent.rounds_begun,
        sent_bytes: sent.transferred_bytes,
        free_bytes: sent.free_pages << 12,
        pause: if way.is_file() { total } else { sent.downtime.unwrap_or(total) },
    })
}
