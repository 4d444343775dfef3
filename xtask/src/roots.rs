//! Roots: small Debian trees under `target/roots`, so that the newest QEMU and libvirt can be asked without
//! touching the host's own packages, the QEMUs of Debian's last two releases, which users' fleets run, and etcd.
//!
//! mmdebstrap fills a directory from the mirror that the host's own apt is set up for. It is built aside and
//! renamed when complete, so that a root that is there is whole, and it is kept between runs. A stamp in it
//! says from which list it was built and which versions came: sid moves, and what the tests have been
//! judged by must be known. A QEMU that is not the one of the specs is reported, never passed in silence.

mod mirror;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::setup::{self, Tool};
use crate::suite::{self, Job};
use crate::workspace::target_directory;

/// What builds a root.
pub const BUILDER: Tool = Tool { program: "mmdebstrap", package: "mmdebstrap" };
/// The QEMU from which specs/ were written.
const QEMU_OF_THE_SPECS: &str = "11.1";
/// Debian's unreleased suite, with the newest of everything.
const SID: &str = "sid";
/// In a root: its list of packages, then each package's version.
const STAMP: &str = "sterna-root";

/// A root that can be built.
#[derive(Debug)]
pub struct Plan {
    /// Directory under `target/roots`.
    pub name: &'static str,
    /// Debian's name of the release.
    suite: &'static str,
    packages: &'static [&'static str],
    /// Whose versions are told in the closing lines.
    judges: &'static [&'static str],
}

/// QEMU, the programs around it, a busybox for its guests, and what the lab VM needs: for RDMA, and beside a Linux guest.
pub const QEMU: Plan = Plan {
    name: "qemu",
    suite: SID,
    packages: &[
        "qemu-system-x86",
        "qemu-utils",
        "virtiofsd",
        "passt",
        "gnutls-bin",
        "busybox-static",
        "ibverbs-providers",
        "iproute2",
        "iputils-ping",
        "iperf3",
        "e2fsprogs",
    ],
    judges: &["qemu-system-x86"],
};
/// What is on the disk of the lab's Linux guest, and what it works with there.
pub const GUEST: Plan = Plan {
    name: "guest",
    suite: "trixie",
    packages: &["busybox-static", "e2fsprogs", "fio", "iperf3", "stress-ng"],
    judges: &[],
};
/// libvirt's QEMU driver with everything that its save images can be packed with.
pub const LIBVIRT: Plan = Plan {
    name: "libvirt",
    suite: SID,
    packages: &[
        "libvirt-daemon",
        "libvirt-daemon-driver-qemu",
        "libvirt-clients",
        "qemu-system-x86",
        "zstd",
        "gzip",
        "xz-utils",
        "lzop",
        "bzip2",
    ],
    judges: &["libvirt-daemon-driver-qemu", "qemu-system-x86"],
};
/// Debian 12's QEMU, 7.2: before `file:` and mapped-ram, with multifd as it was before 8.
pub const QEMU_BOOKWORM: Plan = Plan {
    name: "qemu-bookworm",
    suite: "bookworm",
    packages: &["qemu-system-x86"],
    judges: &["qemu-system-x86"],
};
/// Debian 13's QEMU, 10.0.
pub const QEMU_TRIXIE: Plan = Plan {
    name: "qemu-trixie",
    suite: "trixie",
    packages: &["qemu-system-x86"],
    judges: &["qemu-system-x86"],
};
/// etcd, as an arbiter of claims.
pub const ETCD: Plan =
    Plan { name: "etcd", suite: "trixie", packages: &["etcd-server"], judges: &["etcd-server"] };
const ALL: [&Plan; 6] = [&QEMU, &LIBVIRT, &QEMU_BOOKWORM, &QEMU_TRIXIE, &GUEST, &ETCD];

/// `cargo xtask roots [NAME]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let chosen: Vec<&Plan> = match arguments {
        [] => ALL.to_vec(),
        [name] => ALL.into_iter().filter(|plan| plan.name == name).collect(),
        _ => Vec::new(),
    };
    if chosen.is_empty() {
        let names: Vec<_> = ALL.into_iter().map(|plan| format!("`{}`", plan.name)).collect();
        return Err(Failure::Usage(format!("roots takes {} or nothing", names.join(", "))));
    }
    let mut parts = Parts::default();
    for plan in chosen {
        let mut notes = Vec::new();
        parts.part(&format!("root {}", plan.name), || Ok(outcome(build(plan), &mut notes)));
        notes.into_iter().for_each(|note| parts.note(note));
    }
    parts.finish()
}

/// The command for all roots, beside others: as it may have to download all of them, it may take long.
pub fn job() -> Job {
    Job { limit: suite::DOWNLOAD_LIMIT, ..Job::of_ours("roots", &["roots"]) }
}

/// The command for one root.
pub fn job_of(plan: &Plan) -> Job {
    Job { limit: suite::DOWNLOAD_LIMIT, ..Job::of_ours("roots", &["roots", plan.name]) }
}

/// Where the roots are: ours, unless the caller has others.
pub fn directory() -> PathBuf {
    std::env::var_os("STERNA_ROOTS").map_or_else(|| target_directory().join("roots"), PathBuf::from)
}

/// A root that is there.
#[derive(Debug)]
pub struct Root {
    plan: &'static Plan,
    versions: Vec<(String, String)>,
}

fn outcome(built: Result<Root>, notes: &mut Vec<String>) -> Outcome {
    match built {
        Ok(root) => {
            notes.extend(root.notes());
            Outcome::Passed
        }
        Err(why) => Outcome::Skipped(why),
    }
}

impl Root {
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for judge in self.plan.judges {
            let version = self.versions.iter().find(|(package, _)| package == judge);
            let Some((_, version)) = version else { continue };
            notes.push(format!("root {}: {judge} {version}", self.plan.name));
            let is_of_the_specs = self.plan.suite == SID;
            if is_of_the_specs && *judge == "qemu-system-x86" && minor(version) != QEMU_OF_THE_SPECS {
                notes.push(format!(
                    "DRIFT in root {}: this is QEMU {}, the specs were written from {QEMU_OF_THE_SPECS}: \
                     what passed here passed against another version",
                    self.plan.name,
                    minor(version)
                ));
            }
        }
        notes
    }
}

/// `11.1` of `1:11.1.3+ds-1`.
fn minor(version: &str) -> String {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    let numbers = upstream.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
    numbers.split('.').take(2).collect::<Vec<_>>().join(".")
}

/// Gives back the root, built now if it is not there; the text says why it cannot be had.
fn build(plan: &'static Plan) -> Result<Root> {
    let place = target_directory().join("roots").join(plan.name);
    if let Some(root) = stamped(plan, &place) {
        return Ok(root);
    }
    setup::ensure(&[BUILDER])?;
    let mirror = mirror::of_this_host()?;
    std::fs::create_dir_all(place.parent().unwrap_or(&place)).map_err(|e| said(&place, &e))?;
    let aside = Aside::beside(&place)?;
    fill(plan, &mirror, &aside.0)?;
    write_stamp(plan, &aside.0)?;
    // What stands there is an unfinished root, or one of another list.
    if place.exists() {
        std::fs::remove_dir_all(&place).map_err(|e| said(&place, &e))?;
    }
    std::fs::rename(&aside.0, &place).map_err(|e| said(&place, &e))?;
    stamped(plan, &place).ok_or_else(|| format!("{} was built without its stamp", place.display()))
}

fn fill(plan: &Plan, mirror: &mirror::Mirror, directory: &Path) -> Result<()> {
    let log = directory.with_extension("log");
    let file = std::fs::File::create(&log).map_err(|e| said(&log, &e))?;
    let mut command = Command::new(BUILDER.program);
    command.args(["--variant=minbase", "--quiet", &format!("--include={}", plan.packages.join(","))]);
    let fixed = [("APT::Install-Recommends", "false"), ("Acquire::Languages", "none")];
    let host = mirror.options.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    for (key, value) in host.chain(fixed) {
        command.arg(format!("--aptopt={key} \"{value}\""));
    }
    for path in ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"] {
        command.arg(format!("--dpkgopt=path-exclude={path}"));
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

fn write_stamp(plan: &Plan, directory: &Path) -> Result<()> {
    let database = directory.join("var/lib/dpkg");
    let mut query = Command::new("dpkg-query");
    query.arg("--admindir").arg(database).args(["-W", "-f", "${Package} ${Version}\\n"]);
    let text = format!("{}\n{}", plan.packages.join(" "), process::output(&mut query)?);
    let path = directory.join(STAMP);
    std::fs::write(&path, text).map_err(|e| said(&path, &e))
}

/// The root at that place, if its stamp is of this list of packages.
fn stamped(plan: &'static Plan, place: &Path) -> Option<Root> {
    let text = std::fs::read_to_string(place.join(STAMP)).ok()?;
    let (packages, versions) = text.split_once('\n')?;
    let pair = |line: &str| line.split_once(' ').map(|(name, version)| (name.to_owned(), version.to_owned()));
    (packages == plan.packages.join(" "))
        .then(|| Root { plan, versions: versions.lines().filter_map(pair).collect() })
}

/// A directory that is being filled; gone when dropped, unless it was renamed.
struct Aside(PathBuf);

impl Aside {
    /// Also takes away what runs that were killed have left.
    fn beside(place: &Path) -> Result<Self> {
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent = place.parent().unwrap_or(Path::new("."));
        for entry in std::fs::read_dir(parent).map_err(|e| said(parent, &e))?.flatten() {
            let other = entry.file_name().to_string_lossy().into_owned();
            let Some(pid) = other.strip_prefix(&format!("{name}.building-")) else { continue };
            if pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists() {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        Ok(Self(parent.join(format!("{name}.building-{}", std::process::id()))))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn said(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_of_debian_versions_is_upstreams() {
        assert_eq!(minor("1:11.1.3+ds-1"), "11.1");
        assert_eq!(minor("12.8.0-1"), "12.8");
        assert_eq!(minor("1:12.0~rc1+ds-1"), "12.0");
    }

    #[test]
    fn notes_of_another_qemu_report_the_drift() {
        let of =
            |version: &str| Root { plan: &QEMU, versions: vec![("qemu-system-x86".into(), version.into())] };

        assert_eq!(of("1:11.1.9+ds-1").notes().len(), 1);
        assert!(of("1:12.0.0+ds-1").notes()[1].starts_with("DRIFT"));
    }

    #[test]
    fn roots_of_older_releases_are_expected_to_hold_older_programs() {
        let versions = vec![("qemu-system-x86".to_owned(), "1:7.2+dfsg-7".to_owned())];

        assert_eq!(Root { plan: &QEMU_BOOKWORM, versions }.notes().len(), 1);
    }
}
