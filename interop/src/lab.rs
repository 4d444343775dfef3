//! The lab VM: QEMU's TCG with emulated SVM and nested paging boots Debian's stock kernel, whose only
//! program is this one, as init. So real KVM is had where the host has none.
//!
//! Needs `qemu-system-x86_64`, `apt-get`, `dpkg-deb`, `xz` and `ldd`. The kernel's package is downloaded
//! once into `target/lab`. One vCPU: with two, nested guests under QEMU 7.2 sometimes bring the kernel down.

mod cpio;
mod inside;
mod modules;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::scenarios::Failure;
pub use inside::run_as_init;

/// The line that ends a run, before the number of failures.
const DONE: &str = "LAB-DONE";
/// How long the VM may take, boot and all.
const LIMIT: Duration = Duration::from_secs(300);
const KERNEL_PACKAGE: &str = "linux-image-6.12-amd64";

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
    let root = lab.join("root");
    if !root.join("boot").is_dir() {
        fetch_kernel(&lab, &root)?;
    }
    let kernel =
        find(&root.join("boot"), |name| name.starts_with("vmlinuz")).ok_or("no vmlinuz in the package")?;
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

fn fetch_kernel(lab: &Path, root: &Path) -> Result<(), Failure> {
    let debs = lab.join("deb");
    std::fs::create_dir_all(&debs).map_err(|error| error.to_string())?;
    let package = || find(&debs, |name| name.starts_with("linux-image-") && name.ends_with(".deb"));
    if package().is_none() {
        let depends = output(Command::new("apt-cache").args(["depends", KERNEL_PACKAGE]))?;
        let name = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned);
        let name =
            name.ok_or_else(|| format!("apt knows no package {KERNEL_PACKAGE}; try apt-get update"))?;
        output(Command::new("apt-get").args(["-q", "download", &name]).current_dir(&debs))?;
    }
    let package = package().ok_or("apt-get downloaded no package")?;
    // Unpacked aside and renamed: an interrupted run leaves no half of a root.
    let aside = lab.join(format!("root.{}", std::process::id()));
    output(Command::new("dpkg-deb").arg("-x").arg(package).arg(&aside))?;
    std::fs::rename(&aside, root)
        .or_else(|error| if root.join("boot").is_dir() { Ok(()) } else { Err(error) })
        .map_err(|error| format!("{}: {error}", root.display()))
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

fn find(directory: &Path, matches: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?.flatten();
    entries
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| matches(&name.to_string_lossy())))
}

fn output(command: &mut Command) -> Result<String, Failure> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "{command:?}: {} {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
