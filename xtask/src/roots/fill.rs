//! Fills a root: mmdebstrap downloads the packages with their dependencies and unpacks them.
//!
//! No package is configured, because no test needs the results of the packages' scripts, except for a user. A configured root takes
//! three times as much CPU time.

use std::path::Path;
use std::process::{Command, Stdio};

use super::{BUILDER, Plan, mirror, said};
use crate::process::{self, Result};

/// Packages of every root: the usual directories, the names of users, a shell and its tools.
const BASE: [&str; 4] = ["base-files", "base-passwd", "coreutils", "dash"];
/// Links `/bin`, `/lib` and `/sbin` to the directories in `/usr`, which Debian's scripts otherwise do.
const MERGED: &str = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr";
/// Directories of a root that no test needs.
const UNUSED: [&str; 4] = ["usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt"];
/// The directory of the downloaded packages.
const ARCHIVES: &str = "var/cache/apt/archives";

/// Fills the directory, and returns the packages with their versions.
pub(super) fn fill(plan: &Plan, mirror: &mirror::Mirror, directory: &Path) -> Result<Vec<(String, String)>> {
    unpack(plan, mirror, directory)?;
    let versions = versions(&directory.join(ARCHIVES))?;
    write_accounts(plan, directory)?;
    for place in UNUSED.map(|name| directory.join(name)).iter().filter(|place| place.exists()) {
        std::fs::remove_dir_all(place).map_err(|e| said(place, &e))?;
    }
    Ok(versions)
}

/// Writes the names of Debian's users and groups, and of the plan's own.
fn write_accounts(plan: &Plan, directory: &Path) -> Result<()> {
    let line =
        |text: fn(&str, u32) -> String| plan.user.map_or_else(String::new, |(name, id)| text(name, id));
    let accounts = [
        ("passwd", line(|name, id| format!("{name}:*:{id}:{id}::/nonexistent:/usr/sbin/nologin\n"))),
        ("group", line(|name, id| format!("{name}:*:{id}:\n"))),
    ];
    for (name, own) in accounts {
        let from = directory.join(format!("usr/share/base-passwd/{name}.master"));
        let text = std::fs::read_to_string(&from).map_err(|e| said(&from, &e))?;
        let to = directory.join("etc").join(name);
        std::fs::write(&to, text + &own).map_err(|e| said(&to, &e))?;
    }
    Ok(())
}

fn unpack(plan: &Plan, mirror: &mirror::Mirror, directory: &Path) -> Result<()> {
    let log = directory.with_extension("log");
    let file = std::fs::File::create(&log).map_err(|e| said(&log, &e))?;
    let mut command = Command::new(BUILDER.program);
    let packages = [plan.packages, &BASE].concat().join(",");
    command.args(["--variant=extract", "--quiet", "--skip=cleanup/apt/cache", MERGED]);
    command.arg(format!("--include={packages}"));
    let fixed = [("APT::Install-Recommends", "false"), ("Acquire::Languages", "none")];
    let host = mirror.options.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    for (key, value) in host.chain(fixed) {
        command.arg(format!("--aptopt={key} \"{value}\""));
    }
    command.arg(plan.suite).arg(directory).arg(&mirror.address);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    process::run(&mut command).map_err(|why| {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let last = text.lines().rev().find(|line| line.starts_with("E:")).unwrap_or("no reason given");
        let name = why.split_whitespace().next().unwrap_or_default().trim_start_matches('`');
        format!("{name} could not build it: {last} (all of it in {})", log.display())
    })?;
    let _ = std::fs::remove_file(&log);
    Ok(())
}

/// Names and versions of the downloaded packages, in the order of their names.
fn versions(archives: &Path) -> Result<Vec<(String, String)>> {
    let entries = std::fs::read_dir(archives).map_err(|e| said(archives, &e))?.flatten();
    let mut versions: Vec<_> =
        entries.filter_map(|entry| version(&entry.file_name().to_string_lossy())).collect();
    versions.sort();
    Ok(versions)
}

/// Name and version of a package, from the name of its file: apt writes a colon as `%3a`.
fn version(file: &str) -> Option<(String, String)> {
    let mut words = file.strip_suffix(".deb")?.split('_');
    let (name, version, _architecture) = (words.next()?, words.next()?, words.next()?);
    Some((name.to_owned(), version.replace("%3a", ":")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_a_packages_file_has_its_epoch() {
        let of = |name: &str, version: &str| Some((name.to_owned(), version.to_owned()));

        assert_eq!(version("qemu-utils_1%3a11.1.3+ds-1_amd64.deb"), of("qemu-utils", "1:11.1.3+ds-1"));
        assert_eq!(version("adduser_3.152_all.deb"), of("adduser", "3.152"));
        assert_eq!(version("lock"), None);
    }
}
