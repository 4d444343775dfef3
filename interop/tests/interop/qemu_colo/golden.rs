//! Records a complete session of a QEMU 11 and a standby, in both directions. The engine's
//! `engine replica::golden` uses it.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::Address;
use sterna_interop::{Failure, Guest, Qemu, Ram, Root};
use sterna_standby::{Standby, StandbyOptions};

use super::{PLAIN, json, wait_for_checkpoint};

/// Size limit of the recorded file, in bytes.
const MOST_BYTES: usize = 300 << 10;
/// Number of checkpoints before the last.
const CHECKPOINTS: u64 = 12;

fn words(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}

/// The pieces of the session in order. Consecutive bytes of one side are one piece.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Piece>>>);

/// Number of the sending side, and its bytes.
type Piece = (u8, Vec<u8>);

impl Recorder {
    /// Forwards one connection from `from` to `to` and records it.
    fn lay(&self, from: &Path, to: PathBuf) -> Result<(), Failure> {
        let listener = UnixListener::bind(from).map_err(words)?;
        let this = self.clone();
        std::thread::spawn(move || {
            let Ok((near, _)) = listener.accept() else { return };
            let Ok(far) = UnixStream::connect(&to) else { return };
            let (Ok(near2), Ok(far2)) = (near.try_clone(), far.try_clone()) else { return };
            let back = this.clone();
            std::thread::spawn(move || back.copy(far2, near2, 1));
            this.copy(near, far, 0);
        });
        Ok(())
    }

    fn copy(&self, mut from: UnixStream, mut to: UnixStream, who: u8) {
        let mut piece = vec![0; 256 << 10];
        while let Ok(length) = from.read(&mut piece) {
            if length == 0 {
                break;
            }
            // Recorded before it is forwarded, so that an answer always follows its request.
            let mut said = self.0.lock().unwrap();
            match said.last_mut().filter(|(last, _)| *last == who) {
                Some((_, bytes)) => bytes.extend_from_slice(&piece[..length]),
                None => said.push((who, piece[..length].to_vec())),
            }
            drop(said);
            if to.write_all(&piece[..length]).is_err() {
                break;
            }
        }
        // The connection may be closed already.
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

/// The FNV-1a hash, 64 bits.
fn digest(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[test]
#[ignore = "writes what the engine's test `replica::golden` reads"]
fn session_is_recorded() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("session_is_recorded") else { return Ok(()) };
    let mut primary = Qemu::builder(&root)
        .memory_mib(8)
        .ram(Ram::File)
        .guest(Guest::Talker)
        .args(&["-netdev", "user,id=n0,restrict=on"])
        .spawn()?;
    std::thread::sleep(Duration::from_secs(3));
    let at = |what: &str| primary.directory().join(what);
    let (parameters, capabilities) = PLAIN.engine();
    let options = StandbyOptions::default();
    let standby =
        Standby::listen(&Address::Unix(at("standby")), &options, parameters, capabilities, Arc::new(()))
            .map_err(words)?;
    let recorder = Recorder::default();
    recorder.lay(&at("wire"), at("standby"))?;
    let wire = format!("unix:{}", at("wire").display());
    PLAIN.set(&mut primary)?;
    primary.parameters(json!({"x-checkpoint-delay": 20}))?;
    primary.start_migration(&wire)?;
    wait_for_checkpoint(&mut primary, &standby, CHECKPOINTS)?;
    // The last checkpoint is of a stopped guest, so its RAM is known.
    primary.parameters(json!({"x-checkpoint-delay": 600_000}))?;
    std::thread::sleep(Duration::from_millis(300));
    primary.stop()?;
    let ram = std::fs::read(primary.directory().join("ram")).map_err(words)?;
    let number = standby.statistics().checkpoints + 1;
    primary.parameters(json!({"x-checkpoint-delay": 600_001}))?;
    wait_for_checkpoint(&mut primary, &standby, number)?;
    std::thread::sleep(Duration::from_millis(200));
    primary.kill();

    let mut file =
        [number.to_be_bytes(), (ram.len() as u64).to_be_bytes(), digest(&ram).to_be_bytes()].concat();
    for (who, bytes) in recorder.0.lock().unwrap().iter() {
        file.push(*who);
        file.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
        file.extend_from_slice(bytes);
    }
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(&file).map_err(words)?;
    let packed = packed.finish().map_err(words)?;
    assert!(packed.len() <= MOST_BYTES, "{} bytes of {}", packed.len(), file.len());
    let place =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/sterna-standby/tests/vectors/colo-session.gz");
    std::fs::write(place, packed).map_err(words)
}
