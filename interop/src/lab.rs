//! The lab VM: QEMU's TCG with emulated SVM and nested paging boots Debian's stock kernel, whose only
//! program is this one, as init. So real KVM is had where the host has none.
//!
//! Needs `qemu-system-x86_64`, `apt-get`, `dpkg-deb`, `xz` and `ldd`. The kernel's package is downloaded
//! once into `target/lab`. One vCPU: with two, nested guests under QEMU 7.2 sometimes bring the kernel down.

mod inside;
mod modules;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::kernel::output;
use crate::scenarios::Failure;
use crate::{cpio, kernel};
pub use inside::run_as_init;

/// The line that ends a run, before the number of failures.
const DONE: &str = "LAB-DONE";
/// How long the VM may take, boot and all.
const LIMIT: Duration = Duration::from_secs(300);

/// How a run of the lab ended.
#[derive(Debug)]
pub enum Outcome {
    /// All scenarios passed.
    Passed,
    /// So many failed, or the VM did not get to the end (-1).
    Failed(i32),
    /// The lab cannot be built here.
    Skipped(String),
}

/// Boots the lab and runs every scenario in it; `report` gets each line that it prints.
pub fn run(report: impl FnMut(&str)) -> Outcome {
    match prepare() {
        Ok((kernel, initramfs)) => boot(&kernel, &initramfs, report).unwrap_or_else(Outcome::Skipped),
        Err(why) => Outcome::Skipped(why),
    }
}

fn prepare() -> Result<(PathBuf, PathBuf), Failure> {
    for tool in ["qemu-system-x86_64", "apt-get", "dpkg-deb", "xz", "ldd"] {
        output(Command::new("sh").args(["-c", &format!("command -v {tool}")]))
            .map_err(|_| format!("{tool} is not installed"))?;
    }
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = exe.ancestors().nth(2).ok_or("this program lies outside of a target directory")?;
    let lab = target.join("lab");
    let root = kernel::unpacked(&lab)?;
    let kernel = kernel::image(&lab)?;
    let mut archive = cpio::Archive::default();
    for directory in ["dev", "proc", "sys", "m"] {
        archive.directory(directory);
    }
    archive.file("init", &read(&exe)?);
    for library in libraries(&exe)? {
        archive.file(library.trim_start_matches('/'), &read(Path::new(&library))?);
    }
    for (index, module) in modules::with_dependencies(&root, "kvm-amd")?.iter().enumerate() {
        archive.file(&format!("m/{index:02}"), module);
    }
    let initramfs = lab.join("initramfs");
    std::fs::write(&initramfs, archive.finish())
        .map_err(|error| format!("{}: {error}", initramfs.display()))?;
    Ok((kernel, initramfs))
}

/// What the dynamic linker will ask for.
fn libraries(exe: &Path) -> Result<Vec<String>, Failure> {
    let listing = output(Command::new("ldd").arg(exe))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    Ok(listing.lines().filter_map(path).collect())
}

fn boot(kernel: &Path, initramfs: &Path, mut report: impl FnMut(&str)) -> Result<Outcome, Failure> {
    let mut vm = Command::new("qemu-system-x86_64")
        .args(["-accel", "tcg", "-cpu", "max,+svm,+npt", "-smp", "1", "-m", "1024"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", "console=ttyS0 quiet panic=-1", "-no-reboot", "-nodefaults", "-display", "none"])
        .args(["-serial", "stdio"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("qemu-system-x86_64: {error}"))?;
    let lines = BufReader::new(vm.stdout.take().ok_or("no output of the VM")?);
    let (sender, receiver) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in lines.split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).trim().to_owned()).is_err() {
                return;
            }
        }
    });
    let begin = std::time::Instant::now();
    let mut outcome = Outcome::Failed(-1);
    while let Ok(line) = receiver.recv_timeout(LIMIT.saturating_sub(begin.elapsed())) {
        report(&line);
        if let Some(failures) = line.strip_prefix(DONE) {
            outcome = match failures.trim().parse() {
                Ok(0) => Outcome::Passed,
                Ok(count) => Outcome::Failed(count),
                Err(_) => Outcome::Failed(-1),
            };
            break;
        }
    }
    // It powers off by itself, or hangs: either way it is over. An error means that it has ended.
    let _ = vm.kill();
    let _ = vm.wait();
    drop(receiver);
    let _ = reader.join();
    Ok(outcome)
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}
