//! Moves that are cancelled on either side, or whose connections are cut. Afterwards, the guest must be in
//! exactly one machine.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::{Arrival, Incoming, Migration, Outcome, SourceVm, TargetVm};
use sterna_transport::TlsEndpoint;
use sterna_vmm::KvmMachine;

use super::said;
use super::ways::Way;
use crate::scenarios::{Failure, ensure};

/// Limits of the time and of the bytes until a disturbance. They exceed the values of most moves.
const LATEST: Duration = Duration::from_secs(10);
const MOST_BYTES: u64 = 128 << 20;

/// The disturbance of a move.
#[derive(Debug, Clone, Copy)]
enum Disturbance {
    /// The source's operator cancels after that time.
    Cancel(Duration),
    /// The destination's operator cancels after that time.
    CancelThere(Duration),
    /// All connections are closed when the source has sent this many bytes. New connections are accepted.
    Cut(u64),
}

impl Disturbance {
    fn draw(random: &mut fastrand::Rng) -> Self {
        let mut time = || LATEST.mul_f64(random.f64().powi(2));
        let (here, there) = (time(), time());
        match random.u8(0..3) {
            0 => Self::Cancel(here),
            1 => Self::CancelThere(there),
            _ => Self::Cut((MOST_BYTES as f64 * random.f64()) as u64),
        }
    }
}

/// Moves a guest over sockets with a disturbance. Returns whether it arrived nevertheless. Otherwise it runs
/// at the source.
pub(super) fn move_disturbed(
    from: &Arc<KvmMachine>,
    to: &Arc<KvmMachine>,
    way: Way,
    random: &mut fastrand::Rng,
) -> Result<bool, Failure> {
    let disturbance = Disturbance::draw(random);
    let cut_at = if let Disturbance::Cut(bytes) = disturbance { bytes } else { u64::MAX };
    let directory = tempfile::tempdir().map_err(said)?;
    let address = |name: &str| format!("unix:{}", directory.path().join(name).display()).parse();
    let relay = Relay::start(directory.path().join("relay"), directory.path().join("there"), cut_at)?;
    let (source, target) = (Arc::clone(from) as Arc<dyn SourceVm>, Arc::clone(to) as Arc<dyn TargetVm>);
    let there = address("there").map_err(said)?;
    let (params, capabilities) = way.parameters(TlsEndpoint::Server)?;
    let incoming = Incoming::listen(target, &there, params, capabilities, Arc::new(())).map_err(said)?;
    let here = address("relay").map_err(said)?;
    let (params, capabilities) = way.parameters(TlsEndpoint::Client)?;
    let migration = Migration::start(source, &here, params, capabilities, Arc::new(())).map_err(said)?;
    // A refusal means that the order came too late.
    match disturbance {
        Disturbance::Cancel(after) => {
            std::thread::sleep(after);
            let _ = migration.cancel();
        }
        Disturbance::CancelThere(after) => {
            std::thread::sleep(after);
            let _ = incoming.cancel();
        }
        Disturbance::Cut(_) => {}
    }
    let outcome = migration.wait();
    if !matches!(outcome, Outcome::Completed) {
        // The destination may never have had a connection of the source.
        let _ = incoming.cancel();
    }
    let arrival = incoming.wait();
    let sent = relay.sent.load(Ordering::Relaxed) >> 20;
    println!("LAB disturbed, {way:?}, {disturbance:?}: {outcome:?} after {sent} MiB");
    match (&outcome, &arrival) {
        (Outcome::Completed, Arrival::Completed(_)) => Ok(true),
        (Outcome::Cancelled | Outcome::Failed { held: false, .. }, Arrival::Failed(_)) => {
            ensure(from.is_running() && !to.is_running(), || "the guest runs in the wrong place".to_owned())?;
            Ok(false)
        }
        _ => Err(format!("{disturbance:?}: {outcome:?} here, {arrival:?} there")),
    }
}

/// A proxy that forwards connections.
struct Relay {
    path: PathBuf,
    sent: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Relay {
    fn start(path: PathBuf, to: PathBuf, cut_at: u64) -> Result<Self, Failure> {
        let listener = UnixListener::bind(&path).map_err(said)?;
        let (sent, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, over) = (Arc::clone(&sent), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let open = Arc::new(Mutex::new(Vec::new()));
            for here in listener.incoming().map_while(Result::ok) {
                let there = UnixStream::connect(&to);
                match there {
                    _ if over.load(Ordering::Relaxed) => return,
                    // The source notices the failure on its own end.
                    Err(_) => drop(here),
                    Ok(there) => join(here, there, &open, &count, cut_at),
                }
            }
        });
        Ok(Self { path, sent, is_over })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // This connection wakes the thread.
        let _ = UnixStream::connect(&self.path);
    }
}

/// Forwards bytes in both directions until either end closes or all connections are cut.
fn join(
    here: UnixStream,
    there: UnixStream,
    open: &Arc<Mutex<Vec<UnixStream>>>,
    sent: &Arc<AtomicU64>,
    cut_at: u64,
) {
    let ends = || Ok::<_, std::io::Error>((here.try_clone()?, there.try_clone()?));
    let (Ok((mut here_out, mut there_out)), Ok((a, b))) = (ends(), ends()) else { return };
    open.lock().extend([a, b]);
    let (sent, open) = (Arc::clone(sent), Arc::clone(open));
    let mut here_in = here;
    let mut there_in = there;
    std::thread::spawn(move || {
        pump(&mut here_in, &mut there_out, |bytes| {
            let before = sent.fetch_add(bytes, Ordering::Relaxed);
            if before < cut_at && before + bytes >= cut_at {
                for end in open.lock().drain(..) {
                    let _ = end.shutdown(Shutdown::Both);
                }
            }
        });
    });
    std::thread::spawn(move || pump(&mut there_in, &mut here_out, |_| ()));
}

fn pump(from: &mut UnixStream, to: &mut UnixStream, mut passed: impl FnMut(u64)) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..length]).is_err() {
            break;
        }
        passed(length as u64);
    }
    // The rest of a broken connection is useless.
    let _ = (from.shutdown(Shutdown::Read), to.shutdown(Shutdown::Write));
}
