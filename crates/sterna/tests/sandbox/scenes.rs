//! Small migrations, one for each feature.

use std::path::PathBuf;
use std::sync::Arc;

use sterna::ram::Backing;
use sterna::{
    Address, Capabilities, Compression, Direct, Event, Incoming, Migration, MigrationMode, OnThreadStart,
    Outcome, Parameters, SourceVm, StartError, TargetVm, TlsEndpoint,
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
    /// At the address of [`rdma_address`].
    Rdma,
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

    pub fn direct(mut self) -> Self {
        self.params.direct_io = Direct::Wanted;
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

    pub fn huge(mut self) -> Self {
        self.backing = Backing::Huge2M;
        self
    }

    pub fn pinned(mut self) -> Self {
        self.capabilities.rdma_pin_all = true;
        self
    }

    /// So slow that the migration can be disturbed.
    pub fn limited(mut self) -> Self {
        self.params.max_bandwidth_bytes = 4 << 20;
        self
    }

    pub fn reconnect(mut self) -> Self {
        self.params.reconnect_window = std::time::Duration::from_secs(20);
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
    /// The hook of the threads of the source, and of the destination.
    fn hooks(&self) -> [Option<OnThreadStart>; 2] {
        [None, None]
    }
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
        let temporary = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        // The lab VM cannot write into the target directory.
        let temporary = temporary.or_else(|_| tempfile::tempdir()).unwrap();
        let certificates = crate::certificates::good_directory();
        let read = |endpoint| with_tls(&common::parameters(), certificates.path(), endpoint);
        let tls = [read(TlsEndpoint::Client), read(TlsEndpoint::Server)];
        Self { directory: temporary.path().to_owned(), tls, _temporary: temporary }
    }

    /// The directory has this name inside of a chroot.
    pub fn is_root_now(&mut self) {
        self.directory = "/".into();
    }

    pub fn params(&self, scene: &Scene, sides: &impl Sides, side: usize) -> Parameters {
        let tls = scene.is_tls.then(|| self.tls[side].tls.clone()).flatten();
        let [source, destination] = sides.hooks();
        let on_thread_start = if side == 0 { source } else { destination };
        Parameters { tls, on_thread_start, ..scene.params.clone() }
    }
}

/// Moves a guest, and checks that it arrives complete. Returns the warnings of the source and of the destination.
pub fn moved(scene: &Scene, stage: &Stage) -> [Vec<String>; 2] {
    common::trace();
    let config = scene.config();
    let source = ProcessGuest::boot(config.clone()).unwrap();
    let target = ProcessGuest::waiting(config).unwrap();
    source.cont().unwrap();
    let [saving, loading] = banks(if scene.has_streams { 2 } else { 0 });
    let vms = [TestVm::with_banks(source, saving), TestVm::with_banks(Arc::clone(&target), loading)];
    let logs = [Arc::new(Log::default()), Arc::new(Log::default())];
    let at = address(scene, stage);
    let listening = || listen((scene, stage, &Here), vms[1].clone(), &at, &logs[1]).unwrap();
    let (outcome, arrival) = if scene.place == Place::File {
        let outcome = start((scene, stage, &Here), vms[0].clone(), &at, &logs[0]).wait();
        (outcome, listening().wait())
    } else {
        let incoming = listening();
        let migration = start((scene, stage, &Here), vms[0].clone(), &incoming.address(), &logs[0]);
        if scene.capabilities.postcopy_ram {
            migration.start_postcopy().unwrap();
        }
        (migration.wait(), incoming.wait())
    };
    assert!(matches!(outcome, Outcome::Completed), "{}: {outcome:?}; {arrival:?}", scene.name);
    common::assert_arrived(&outcome, &arrival, &target);
    logs.map(|log| warnings(&log))
}

pub fn address(scene: &Scene, stage: &Stage) -> Address {
    let path = stage.directory.join(scene.name.replace(' ', "-"));
    match scene.place {
        Place::Tcp => "tcp:127.0.0.1:0".parse().unwrap(),
        Place::Unix => Address::Unix(path),
        Place::File => Address::File { path, offset: 0 },
        Place::Rdma => format!("rdma:{}:0", rdma_address().unwrap()).parse().unwrap(),
    }
}

/// The IP address of this host's RDMA adapter, which the lab sets.
pub fn rdma_address() -> Option<String> {
    std::env::var("STERNA_TEST_RDMA_ADDRESS").ok()
}

/// Drops all packets of that adapter from now on, by the lab's command.
pub fn cut_rdma() {
    let command = std::env::var("STERNA_TEST_RDMA_CUT").expect("the lab's command that cuts the wire");
    let mut words = command.split(' ');
    let done = std::process::Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(done.success(), "{command}: {done}");
}

/// Starts a destination in its sandbox.
pub fn listen<S: Sides>(
    (scene, stage, sides): (&Scene, &Stage, &S),
    vm: Arc<dyn TargetVm>,
    at: &Address,
    log: &Arc<Log>,
) -> Result<Incoming, StartError> {
    let params = stage.params(scene, sides, 1);
    sides.at_destination(|| Incoming::listen(vm, at, params, scene.capabilities, log.clone()))
}

/// Starts a source in its sandbox.
pub fn start<S: Sides>(
    (scene, stage, sides): (&Scene, &Stage, &S),
    vm: Arc<dyn SourceVm>,
    to: &Address,
    log: &Arc<Log>,
) -> Migration {
    let params = stage.params(scene, sides, 0);
    sides.at_source(|| Migration::start(vm, to, params, scene.capabilities, log.clone()).unwrap())
}

fn warnings(log: &Log) -> Vec<String> {
    let warning = |event| match event {
        Event::Warning(text) => Some(text),
        _ => None,
    };
    log.events().into_iter().filter_map(warning).collect()
}
