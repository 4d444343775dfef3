//! Two QEMUs. The new one receives descriptors over a separate channel (`cpr`) before it has a monitor. All
//! other data uses `main`.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::peer::Peer;
use sterna_interop::{Accelerator, Builder, Qemu, Root, is_listening};

use crate::{Move, begin, end};

/// A size that every disk controller accepts.
const DISK_BYTES: u64 = 1 << 20;
/// Time limit until the new process waits.
const START: Duration = Duration::from_secs(30);

pub(crate) fn once(root: &Root, bytes: u64, sector: &Path) -> Result<Move, Failure> {
    let place = directory()?;
    let disk = place.path().join("disk");
    std::fs::copy(sector, &disk)
        .and_then(|_| std::fs::OpenOptions::new().write(true).open(&disk)?.set_len(DISK_BYTES))
        .map_err(|error| format!("{}: {error}", disk.display()))?;
    let drive = format!("file={},format=raw,if=none,id=boot,snapshot=on", disk.display());
    let builder = builder(root, bytes).args(&["-drive", &drive, "-device", "ide-hd,drive=boot,bootindex=0"]);
    let here = directory()?;
    let command = builder.clone().arg("-S").command_in(here.path())?;
    let mut source = Peer::start("QEMU", command, here)?;
    let words = begin(&mut source)?;

    let channels = ["main", "cpr"].map(|kind| channel(kind, place.path()));
    let there = directory()?;
    let mut command = builder.command_in(there.path())?;
    for channel in &channels {
        command.args(["-incoming", &channel.to_string()]);
    }
    let starts = thread::spawn(move || Peer::start("the new QEMU", command, there));
    let waits = place.path().join("cpr");
    let since = Instant::now();
    while !is_listening(&waits) {
        if since.elapsed() > START || starts.is_finished() {
            return Err(match starts.is_finished().then(|| starts.join()) {
                Some(Ok(Err(why))) => why,
                _ => "the new QEMU does not wait for descriptors".to_owned(),
            });
        }
        thread::sleep(Duration::from_millis(2));
    }
    words.clear_longest_gap()?;
    let began = Instant::now();
    source.execute("migrate", json!({ "channels": channels }))?;
    let joined = || starts.join().map_err(|_| "starting the new QEMU panicked".to_owned())?;
    end(began, &mut source, joined, &words)
}

fn builder(root: &Root, bytes: u64) -> Builder {
    // QEMU must pass descriptors of all memory, including the devices' memory.
    let memory = format!("memory-backend-memfd,id=ram0,share=on,size={bytes}");
    Qemu::builder(root)
        .accelerator(Accelerator::Kvm)
        .memory_mib(bytes >> 20)
        .machine("pc,memory-backend=ram0,aux-ram-share=on")
        .args(&["-object", &memory])
}

fn channel(kind: &str, place: &Path) -> Value {
    let path = place.join(kind).display().to_string();
    json!({"channel-type": kind, "addr": {"transport": "socket", "type": "unix", "path": path}})
}

fn directory() -> Result<tempfile::TempDir, Failure> {
    let made = tempfile::Builder::new().prefix("sterna-bench-").tempdir();
    made.map_err(|error| format!("no temporary directory: {error}"))
}
