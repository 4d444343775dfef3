//! Debian's stock kernel. The host's apt downloads its package once; it is unpacked and not installed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;

const PACKAGE: &str = "linux-image-6.12-amd64";

/// Path of the kernel's image under `lab`.
pub(crate) fn image(lab: &Path) -> Result<PathBuf, Failure> {
    let root = unpacked(lab)?;
    find(&root.join("boot"), |name| name.starts_with("vmlinuz")).ok_or("no vmlinuz in the package".into())
}

/// The unpacked package under `lab`. Downloads it if it is missing.
pub(crate) fn unpacked(lab: &Path) -> Result<PathBuf, Failure> {
    let root = lab.join("root");
    std::fs::create_dir_all(lab).map_err(|error| format!("{}: {error}", lab.display()))?;
    // The lock is needed because tests run in parallel, in several programs.
    let lock = lab.join("lock");
    let file = File::create(&lock).map_err(|error| format!("{}: {error}", lock.display()))?;
    file.lock().map_err(|error| format!("{}: {error}", lock.display()))?;
    if !root.join("boot").is_dir() {
        fetch(lab, &root)?;
    }
    Ok(root)
}

fn fetch(lab: &Path, root: &Path) -> Result<(), Failure> {
    let debs = lab.join("deb");
    std::fs::create_dir_all(&debs).map_err(|error| error.to_string())?;
    let package = || find(&debs, |name| name.starts_with("linux-image-") && name.ends_with(".deb"));
    if package().is_none() {
        let depends = output(Command::new("apt-cache").args(["depends", PACKAGE]))?;
        let name = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned);
        let name = name.ok_or_else(|| format!("apt knows no package {PACKAGE}; try apt-get update"))?;
        output(Command::new("apt-get").args(["-q", "download", &name]).current_dir(&debs))?;
    }
    let package = package().ok_or("apt-get downloaded no package")?;
    // The package is unpacked into another directory that is then renamed. An interrupted run therefore
    // leaves no partial root.
    let aside = lab.join(format!("root.{}", std::process::id()));
    output(Command::new("dpkg-deb").arg("-x").arg(package).arg(&aside))?;
    std::fs::rename(&aside, root).map_err(|error| format!("{}: {error}", root.display()))
}

/// A file of `directory` whose name matches.
pub(crate) fn find(directory: &Path, matches: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?.flatten();
    entries
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| matches(&name.to_string_lossy())))
}

/// Runs `command` and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
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
