//! Small migrations, one for each feature.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna::ram::Backing;
use sterna::{
    Address, Arrival, Capabilities, Compression, Direct, Event, Incoming, Migration, MigrationMode, Outcome,
    Parameters, SourceVm, TargetVm, TlsEndpoint,
};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};

use crate::common::{self, Log};
use crate::support::pairs::{banks, with_tls};
use crate::support::{TestVm, small};

/// The peer's place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Tcp,
    Unix,
    File,
}

/// A way to move a guest.
#[derive(Clone)]
pub struct Scene {
    pub name: &'static str,
    pub place: Place,
    pub params: Parameters,
    pub capabilities: Capabilities,
    pub has_streams: bool,
    pub is_tls: bool,
    pub backing: Backing,
}

impl Scene {
    pub fn new(name: &'static str, place: Place) -> Self {
        Self {
            name,
            place,
            params: common::parameters(),
            capabilities: Capabilities::default(),
            has_streams: false,
            is_tls: false,
            backing: Backing::Memfd,
        }
    }

    pub fn multifd(mut self) -> Self {
        self.capabilities.multifd = true;
        self.params.multifd_channels = 2;
        self
    }

    pub fn compressed(mut self, how: Compression) -> Self {
        self.params.multifd_compression = how;
        self.multifd()
    }

    pub fn postcopy(mut self) -> Self {
        self.capabilities.postcopy_ram = true;
        self.capabilities.postcopy_preempt = true;
        self.params.max_bandwidth_bytes = 10 << 20;
        self
    }

    pub fn same_host(mut self) -> Self {
        self.params.mode = MigrationMode::CprTransfer;
        self
    }

    pub fn mapped(mut self, direct_io: Direct) -> Self {
        self.capabilities.mapped_ram = true;
        self.params.direct_io = direct_io;
        self
    }

    pub fn streams(mut self) -> Self {
        self.has_streams = true;
        self
    }

    pub fn tls(mut self) -> Self {
        self.is_tls = true;
        self
    }

    pub fn anonymous(mut self) -> Self {
        self.backing = Backing::Anonymous;
        self
    }

    fn config(&self) -> ProcessConfig {
        ProcessConfig { backing: self.backing, fill: Fill::Half(7), ..small() }
    }
}

/// Where and how the sides of a scene are started: a sandbox may begin there.
pub trait Sides {
    fn at_source<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T;
    fn at_destination<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T;
}

/// Both sides are started by the calling thread.
pub struct Here;

impl Sides for Here {
    fn at_source<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        act()
    }
    fn at_destination<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        act()
    }
}

/// Things that must exist before a sandbox closes.
pub struct Stage {
    pub directory: PathBuf,
    /// Settings with certificates, which are read from files: of the source and of the destination.
    tls: [Parameters; 2],
    _temporary: tempfile::TempDir,
}

impl Stage {
    pub fn new() -> Self {
        let temporary = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let certificates = crate::certificates::good_directory();
        let read = |endpoint| with_tls(&common::parameters(), certificates.path(), endpoint);
        let tls = [read(TlsEndpoint::Client), read(TlsEndpoint::Server)];
        Self { directory: temporary.path().to_owned(), tls, _temporary: temporary }
    }

    /// The directory has this name inside of a chroot.
    pub fn is_root_now(&mut self) {
        self.directory = "/".into();
    }

    fn params(&self, scene: &Scene, side: usize) -> Parameters {
        let tls = scene.is_tls.then(|| self.tls[side].tls.clone()).flatten();
        Parameters { tls, ..scene.params.clone() }
    }
}

/// A guest that was moved.
pub struct Moved {
    pub source: Arc<ProcessGuest>,
    pub target: Arc<ProcessGuest>,
    pub migration: Migration,
    /// Warnings of the source and of the destination.
    pub warnings: [Vec<String>; 2],
}

/// Moves a guest, and checks that it arrives complete.
pub fn moved(scene: &Scene, stage: &Stage, sides: &impl Sides) -> Moved {
    common::trace();
    let config = scene.config();
    let source = ProcessGuest::boot(config.clone()).unwrap();
    let target = ProcessGuest::waiting(config).unwrap();
    source.cont().unwrap();
    let [saving, loading] = banks(if scene.has_streams { 2 } else { 0 });
    let vms =
        [TestVm::with_banks(Arc::clone(&source), saving), TestVm::with_banks(Arc::clone(&target), loading)];
    let logs = [Arc::new(Log::default()), Arc::new(Log::default())];
    let (migration, outcome, arrival) = if scene.place == Place::File {
        through_file(scene, stage, sides, &vms, &logs)
    } else {
        over_sockets(scene, stage, sides, &vms, &logs)
    };
    assert!(matches!(outcome, Outcome::Completed), "{}: {outcome:?}; {arrival:?}", scene.name);
    common::assert_arrived(&outcome, &arrival, &target);
    Moved { source, target, migration, warnings: logs.map(|log| warnings(&log)) }
}

fn address(scene: &Scene, stage: &Stage) -> Address {
    match scene.place {
        Place::Tcp => "tcp:127.0.0.1:0".parse().unwrap(),
        Place::Unix => Address::Unix(stage.directory.join(scene.name.replace(' ', "-"))),
        Place::File => Address::File { path: stage.directory.join(scene.name.replace(' ', "-")), offset: 0 },
    }
}

/// Starts a destination in that sandbox.
pub fn listen(
    scene: &Scene,
    stage: &Stage,
    sides: &impl Sides,
    vm: &Arc<TestVm>,
    log: &Arc<Log>,
) -> Result<Incoming, sterna::StartError> {
    let (params, at) = (stage.params(scene, 1), address(scene, stage));
    let vm: Arc<dyn TargetVm> = Arc::clone(vm) as _;
    sides.at_destination(|| Incoming::listen(vm, &at, params, scene.capabilities, log.clone()))
}

/// Starts a source in that sandbox.
pub fn start(
    scene: &Scene,
    stage: &Stage,
    sides: &impl Sides,
    (vm, to): (&Arc<TestVm>, &Address),
    log: &Arc<Log>,
) -> Migration {
    let params = stage.params(scene, 0);
    let vm: Arc<dyn SourceVm> = Arc::clone(vm) as _;
    sides.at_source(|| Migration::start(vm, to, params, scene.capabilities, log.clone()).unwrap())
}

fn over_sockets(
    scene: &Scene,
    stage: &Stage,
    sides: &impl Sides,
    [source, target]: &[Arc<TestVm>; 2],
    logs: &[Arc<Log>; 2],
) -> (Migration, Outcome, Arrival) {
    let incoming = listen(scene, stage, sides, target, &logs[1]).unwrap();
    let migration = start(scene, stage, sides, (source, &incoming.address()), &logs[0]);
    if scene.capabilities.postcopy_ram {
        migration.start_postcopy().unwrap();
    }
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    (migration, outcome, arrival)
}

fn through_file(
    scene: &Scene,
    stage: &Stage,
    sides: &impl Sides,
    [source, target]: &[Arc<TestVm>; 2],
    logs: &[Arc<Log>; 2],
) -> (Migration, Outcome, Arrival) {
    let migration = start(scene, stage, sides, (source, &address(scene, stage)), &logs[0]);
    let outcome = migration.wait();
    let incoming = listen(scene, stage, sides, target, &logs[1]).unwrap();
    let arrival = incoming.wait();
    (migration, outcome, arrival)
}

fn warnings(log: &Log) -> Vec<String> {
    let warning = |event| match event {
        Event::Warning(text) => Some(text),
        _ => None,
    };
    log.events().into_iter().filter_map(warning).collect()
}

/// Removes what a scene leaves in the directory.
pub fn clean(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        let _ = std::fs::remove_file(entry.path());
    }
}
