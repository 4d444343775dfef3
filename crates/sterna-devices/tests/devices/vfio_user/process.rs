//! Tests of devices in other processes: migrated, crashed, killed and stopped.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{DeviceStream, VmError};
use sterna_devices::statebank::{STATUS_REGION, Status, Verdict};
use sterna_devices::vfio::{MigState, MigrationPort, VfioDevice};
use sterna_devices::vfio_user::{Client, ClientOptions};

use super::support::{Chunks, Plan, TIMEOUT, migrate};

/// Longer than every operation that ends.
const LONG: Duration = Duration::from_secs(60);

/// A child process that is killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// Waits for the end. Returns exit code and standard output.
    fn ended(&mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().code(), said)
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.0.id()).unwrap();
        // SAFETY: no memory is passed; the process is our child and was not waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}

struct Bank {
    device: VfioDevice<Arc<Client>>,
    client: Arc<Client>,
    process: Process,
    _directory: tempfile::TempDir,
}

fn start(timeout: Duration, arguments: &[&str]) -> Bank {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bank");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna-statebank"));
    command.arg("--socket").arg(&path).args(arguments).stdout(Stdio::piped());
    let mut process = Process(command.spawn().unwrap());
    let began = Instant::now();
    let options = ClientOptions { timeout };
    let client = loop {
        match Client::connect(&path, &options) {
            Ok(client) => break Arc::new(client),
            Err(error) => assert!(began.elapsed() < LONG, "{error}"),
        }
        assert!(process.0.try_wait().unwrap().is_none(), "it ended at once");
        std::thread::sleep(Duration::from_millis(5));
    };
    let device = VfioDevice::new(Arc::clone(&client)).unwrap();
    Bank { device, client, process, _directory: directory }
}

fn status(bank: &Bank) -> Status {
    let mut bytes = [0; Status::BYTES];
    bank.client.region_read(STATUS_REGION, 0, &mut bytes).unwrap();
    Status::decode(&bytes).unwrap()
}

#[test]
fn processes_that_moved_a_state_agree_and_end_well() {
    let source = start(LONG, &["--state", "3M", "--precopy", "40", "--seed", "8"]);
    let target = start(LONG, &["--state", "3M", "--precopy", "40"]);

    migrate(&source.device, &target.device, Plan::plain()).unwrap();

    let (from, to) = (status(&source), status(&target));
    assert_eq!((from.state, to.state), (MigState::Stop, MigState::Running));
    assert_eq!(from.digest, to.digest);
    assert_eq!(to.loaded, Verdict::Good);
    let Bank { device, client, mut process, .. } = target;
    drop((device, client));
    let (code, said) = process.ended();
    assert_eq!(code, Some(0));
    assert!(said.contains(&format!("loaded Good ram None digest {:#018x}", to.digest)), "{said}");
}

#[test]
fn process_that_got_a_wrong_byte_says_so_and_ends_badly() {
    let source = start(LONG, &["--state", "100K"]);
    let target = start(LONG, &["--state", "100K"]);
    let mut bytes = vec![0; 200_000];
    source.device.begin_save().unwrap();
    source.device.stop().unwrap();
    let read = source.device.read(&mut bytes).unwrap();
    bytes[70_000] ^= 4;

    target.device.begin_load().unwrap();
    let refused = target.device.write(&bytes[..read]).unwrap_err();

    assert!(
        refused.to_string().contains("in state RESUMING: MIG_DATA_WRITE: the device refused the request"),
        "{refused}"
    );
    let Bank { device, client, mut process, .. } = target;
    drop((device, client));
    let (code, said) = process.ended();
    assert_eq!(code, Some(3));
    assert!(said.contains("byte 70000: byte 4368 of block 1"), "{said}");
}

#[test]
fn process_that_dies_on_purpose_is_gone_and_says_why() {
    let mut source = start(LONG, &["--state", "1M", "--fault", "die@stop-copy:300000"]);
    let target = start(LONG, &["--state", "1M"]);

    let plan = Plan { chunks: Chunks::up_to(10_000), ..Plan::plain() };
    let error = migrate(&source.device, &target.device, plan).unwrap_err();

    assert!(error.to_string().contains("in state STOP_COPY: MIG_DATA_READ"), "{error}");
    assert!(error.to_string().contains("is lost"), "{error}");
    assert_eq!(source.process.ended().0, Some(86));
}

/// Performs step `place` of a save.
fn step(source: &Bank, place: usize, buffer: &mut [u8]) -> Result<(), VmError> {
    match place {
        0 => source.device.begin_save(),
        1 => source.device.read(buffer).map(drop),
        _ => source.device.quiesce().and_then(|()| source.device.stop()),
    }
}

#[test]
fn process_that_is_killed_or_stopped_at_any_place_is_told_apart() {
    for (signal, expected) in [(libc::SIGKILL, "is lost"), (libc::SIGSTOP, "no answer within")] {
        for place in 0..3 {
            let source = start(TIMEOUT, &["--state", "1M", "--precopy", "50"]);
            let mut buffer = vec![0; 1000];
            (0..place).for_each(|earlier| step(&source, earlier, &mut buffer).unwrap());
            source.process.signal(signal);
            let error = step(&source, place, &mut buffer);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&source.client.name()) && error.contains(expected), "{place}: {error}");
        }
    }
}

#[test]
fn process_that_was_stopped_for_a_while_is_brought_back() {
    let (source, target) = (
        start(TIMEOUT, &["--state", "1M", "--precopy", "50"]),
        start(LONG, &["--state", "1M", "--precopy", "50"]),
    );
    let mut buffer = vec![0; 1000];
    source.device.begin_save().unwrap();
    source.process.signal(libc::SIGSTOP);

    let error = source.device.read(&mut buffer).unwrap_err();
    source.process.signal(libc::SIGCONT);
    source.device.end_save().unwrap();
    source.device.run().unwrap();

    assert!(error.to_string().contains("no answer within"), "{error}");
    assert_eq!(status(&source).state, MigState::Running);
    migrate(&source.device, &target.device, Plan::plain()).unwrap();
    assert_eq!(status(&source).digest, status(&target).digest);
}

#[test]
fn reader_that_asks_all_the_time_lets_others_have_their_turn() {
    let source = start(LONG, &["--state", "1G", "--precopy", "100"]);
    source.device.begin_save().unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);

    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut buffer = vec![0; 1 << 20];
            let mut reads = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed)
                && source.client.read_data(&mut buffer).unwrap() > 0
            {
                reads += 1;
            }
            reads
        });
        // Each request waits for at most one read, so 1000 reads cannot pass meanwhile.
        (0..20).for_each(|_| assert!(source.client.data_size().unwrap() > 0));
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(reader.join().unwrap() < 900, "the others waited for the end of the stream");
    });
}
