//! The ways in which a guest moves from one machine to another.

use std::sync::Arc;

use sterna::{
    Arrival, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm,
};
use sterna_vmm::KvmMachine;

use super::said;
use crate::scenarios::{Failure, ensure};

/// How a guest moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Plain,
    Multifd,
    Zstd,
    /// Into an image with RAM mapped, and out of it.
    MappedRam,
    /// Into a file as over a socket, and out of it.
    File,
}

impl Way {
    /// In turns.
    pub(super) const ALL: [Self; 5] = [Self::Plain, Self::Multifd, Self::MappedRam, Self::Zstd, Self::File];

    fn parameters(self) -> (Parameters, Capabilities) {
        let multifd_compression = if self == Self::Zstd { Compression::Zstd } else { Compression::None };
        let params = Parameters { multifd_channels: 2, multifd_compression, ..Parameters::default() };
        let capabilities = Capabilities {
            return_path: !self.is_file(),
            multifd: matches!(self, Self::Multifd | Self::Zstd | Self::MappedRam),
            mapped_ram: self == Self::MappedRam,
            ..Capabilities::default()
        };
        (params, capabilities)
    }

    pub(super) fn is_file(self) -> bool {
        matches!(self, Self::MappedRam | Self::File)
    }
}

/// Moves it, and waits until it runs there.
pub(super) fn move_guest(from: &Arc<KvmMachine>, to: &Arc<KvmMachine>, way: Way) -> Result<(), Failure> {
    let directory = tempfile::tempdir().map_err(said)?;
    let path = directory.path().join("s");
    let scheme = if way.is_file() { "file" } else { "unix" };
    let address = format!("{scheme}:{}", path.display()).parse().map_err(said)?;
    let (params, capabilities) = way.parameters();
    let receive = || {
        let to: Arc<dyn TargetVm> = Arc::clone(to) as _;
        Incoming::listen(to, &address, params.clone(), capabilities, Arc::new(())).map_err(said)
    };
    let send = || {
        let from: Arc<dyn SourceVm> = Arc::clone(from) as _;
        let migration = Migration::start(from, &address, params.clone(), capabilities, Arc::new(()));
        let migration = migration.map_err(said)?;
        let outcome = migration.wait();
        ensure(matches!(outcome, Outcome::Completed), || format!("{outcome:?}"))
    };
    let incoming = if way.is_file() {
        send()?;
        receive()?
    } else {
        let incoming = receive()?;
        send()?;
        incoming
    };
    let arrival = incoming.wait();
    ensure(matches!(arrival, Arrival::Completed(_)), || format!("{arrival:?}"))
}
