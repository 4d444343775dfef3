//! Helpers that the tests share. There are statebanks in this or another process, and a pump that moves state
//! between them.

use std::sync::Arc;
use std::time::Duration;

use sterna::{DeviceStream, VmError};
use sterna_devices::statebank::{BankServer, StateBank, StateBankConfig};
use sterna_devices::vfio::VfioDevice;
use sterna_devices::vfio_user::{Client, ClientOptions};

/// Time limit of a client whose server hangs. Tests never reach it otherwise.
pub const TIMEOUT: Duration = Duration::from_millis(300);

/// A statebank behind a server, and a client as the engine uses it.
pub struct Served {
    pub device: VfioDevice<Arc<Client>>,
    pub client: Arc<Client>,
    pub server: BankServer,
    _directory: tempfile::TempDir,
}

impl Served {
    pub fn bank(&self) -> &Arc<StateBank> {
        self.server.bank()
    }
}

pub fn serve(config: StateBankConfig) -> Served {
    let patient = ClientOptions { timeout: Duration::from_secs(60) };
    serve_with(config, &patient)
}

pub fn serve_with(config: StateBankConfig, options: &ClientOptions) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bank");
    let server = StateBank::new(config).unwrap().serve(&path).unwrap();
    let client = Arc::new(Client::connect(&path, options).unwrap());
    let device = VfioDevice::new(Arc::clone(&client)).unwrap();
    Served { device, client, server, _directory: directory }
}

pub fn alone(config: StateBankConfig) -> (VfioDevice<Arc<StateBank>>, Arc<StateBank>) {
    let bank = StateBank::new(config).unwrap();
    (VfioDevice::new(Arc::clone(&bank)).unwrap(), bank)
}

/// Sizes of the chunks that a pump reads.
pub struct Chunks {
    random: fastrand::Rng,
    most: usize,
}

impl Chunks {
    /// Random sizes of at most `most` bytes, seeded by STERNA_SEED.
    pub fn up_to(most: usize) -> Self {
        Self { random: sterna_testing::random("chunks"), most }
    }

    fn next(&mut self) -> usize {
        self.random.usize(1..=self.most)
    }
}

/// Options of a pump.
pub struct Plan<'a> {
    pub chunks: Chunks,
    /// Highest number of reads while the device runs.
    pub running_reads: usize,
    /// Called after both devices have stopped, before the rest is read.
    pub stopped: &'a dyn Fn(),
}

impl Plan<'_> {
    pub fn plain() -> Self {
        Plan { chunks: Chunks::up_to(1 << 20), running_reads: 1000, stopped: &|| {} }
    }
}

/// Migrates the device in the engine's order. After a failure it undoes both sides like the engine.
pub fn migrate(source: &dyn DeviceStream, target: &dyn DeviceStream, plan: Plan<'_>) -> Result<u64, VmError> {
    let moved = attempt(source, target, plan);
    if moved.is_err() {
        // A dead device may fail here.
        let _ = source.end_save();
        let _ = source.run();
        let _ = target.end_load();
    }
    moved
}

fn attempt(source: &dyn DeviceStream, target: &dyn DeviceStream, mut plan: Plan<'_>) -> Result<u64, VmError> {
    let mut buffer = vec![0; plan.chunks.most];
    let mut moved = 0;
    source.begin_save()?;
    target.begin_load()?;
    for _ in 0..plan.running_reads {
        let some = plan.chunks.next();
        let read = source.read(&mut buffer[..some])?;
        if read == 0 {
            break;
        }
        target.write(&buffer[..read])?;
        moved += read as u64;
    }
    source.quiesce()?;
    source.stop()?;
    (plan.stopped)();
    loop {
        let some = plan.chunks.next();
        let read = source.read(&mut buffer[..some])?;
        if read == 0 {
            break;
        }
        target.write(&buffer[..read])?;
        moved += read as u64;
    }
    let configuration = source.configuration()?;
    target.finish_load(&configuration)?;
    source.end_save()?;
    target.run()?;
    Ok(moved)
}
