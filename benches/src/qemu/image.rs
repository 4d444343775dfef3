//! Save and restore: a machine's own migration to and from a file, and `sterna save` and `restore` of a QEMU.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use serde_json::json;

use crate::Failure;
use crate::chain::Chain;
use crate::figures::Sample;
use crate::tools::Tool;
use sterna_benches::clock;
use sterna_benches::machines::Role;
use sterna_benches::peer::{Peer, Settings};

/// A machine's own save, and the restore of that image: `migrate` to `file:`, `migrate-incoming` from it.
pub fn own(
    chain: &Chain<'_>,
    settings: &Settings,
    place: &Path,
    check: bool,
) -> Result<Vec<Sample>, Failure> {
    let image = Image::new(place)?;
    let uri = format!("file:{}", image.0.display());
    let mut source = chain.source()?;
    source.prepare(settings)?;
    recycle(chain.content.bytes);
    let (cpu, began) = (source.cpu(), Instant::now());
    source.execute("migrate", json!({ "uri": uri }))?;
    source.wait_until_completed()?;
    let took = began.elapsed();
    let cpu = source.cpu().saturating_sub(cpu);
    let saved = image.settle(took, cpu)?;
    drop(source);
    let mut target = chain.destination(Role::Destination)?;
    target.prepare(settings)?;
    recycle(chain.content.bytes);
    let (cpu, began) = (target.cpu(), Instant::now());
    target.execute("migrate-incoming", json!({ "uri": uri }))?;
    target.wait_until_completed()?;
    let restored =
        Sample { took: began.elapsed(), cpu: target.cpu().saturating_sub(cpu), ..Sample::default() };
    chain.arrived(target, check)?;
    Ok(vec![saved, restored])
}

/// `sterna save` of a QEMU, and `sterna restore` into another. Times are from the start of the command to its
/// end; CPU times include QEMU's.
pub fn tool(chain: &Chain<'_>, tool: &Tool, place: &Path, check: bool) -> Result<Vec<Sample>, Failure> {
    let image = Image::new(place)?;
    let source = chain.source()?;
    let mut save = Command::new(&chain.lab.sterna);
    save.arg("save").args(&tool.arguments).arg(source.socket()).arg(&image.0);
    recycle(chain.content.bytes);
    let (took, cpu) = run(&mut save, &source)?;
    let saved = image.settle(took, cpu)?;
    drop(source);
    if !tool.can_restore {
        return Ok(vec![saved]);
    }
    let target = chain.destination(Role::Destination)?;
    let mut restore = Command::new(&chain.lab.sterna);
    restore.arg("restore").arg(&image.0).arg(target.socket());
    recycle(chain.content.bytes);
    let (took, cpu) = run(&mut restore, &target)?;
    chain.arrived(target, check)?;
    Ok(vec![saved, Sample { took, cpu, ..Sample::default() }])
}

/// Runs `command`, which drives `peer`.
fn run(command: &mut Command, peer: &Peer) -> Result<(Duration, Duration), Failure> {
    let (cpu, began) = (peer.cpu() + clock::ended_children(), Instant::now());
    let done = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).output();
    let done = done.map_err(|error| format!("cannot start sterna: {error}"))?;
    let took = began.elapsed();
    let cpu = (peer.cpu() + clock::ended_children()).saturating_sub(cpu);
    if done.status.success() {
        return Ok((took, cpu));
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("sterna has failed").to_owned())
}

/// Allocates memory and frees it. The page cache then gets memory that is not new to this virtual machine, in
/// all measurements alike.
fn recycle(bytes: u64) {
    let mut memory = vec![0u8; bytes as usize];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
}

/// An image that is removed when dropped.
struct Image(PathBuf);

impl Image {
    fn new(place: &Path) -> Result<Self, Failure> {
        let path = place.join("image");
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", path.display()))
            }
            _ => Ok(Self(path)),
        }
    }

    /// The sample of a save that took `took`. Makes the image durable and drops it from the page cache, so
    /// that the restore reads the disk.
    fn settle(&self, took: Duration, cpu: Duration) -> Result<Sample, Failure> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.0.display());
        let began = Instant::now();
        let file = File::open(&self.0).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        let durable = Some(took + began.elapsed());
        fadvise(&file, 0, None, Advice::DontNeed).map_err(|error| failed(error.into()))?;
        let image_bytes = Some(file.metadata().map_err(failed)?.blocks() * 512);
        Ok(Sample { took, durable, cpu, image_bytes, ..Sample::default() })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // The image may never have been written. A remaining file is removed with its directory.
        let _ = std::fs::remove_file(&self.0);
    }
}
