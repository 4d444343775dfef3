//! Roots: small Debian trees under `target/roots`, which tests use without changes to the host's
//! own packages. They contain the newest QEMU and libvirt, the QEMUs of Debian's last two releases
//! (which users run), and etcd.
//!
//! mmdebstrap unpacks packages from the mirror that the host's own apt uses into a directory. The
//! directory is built under another name and renamed when complete, so that a root that exists is
//! complete. Roots are kept between runs. A stamp in the root records its list of packages and
//! their versions: sid changes, and a test report must name the versions. A QEMU of another version
//! than the specs is reported, never used silently.

mod fill;
mod mirror;
mod versitygw;

use std::path::{Path, PathBuf};

use self::fill::fill;
use crate::parts::{Outcome, Parts};
use crate::process::{Failure, Result};
use crate::setup::{self, Tool};
use crate::suite::{self, Job};
use crate::workspace::target_directory;

/// The program that builds a root.
pub const BUILDER: Tool = Tool { program: "mmdebstrap", package: "mmdebstrap" };
/// The version of QEMU from which specs/ were written.
const QEMU_OF_THE_SPECS: &str = "11.1";
/// Debian's unreleased suite, which has the newest packages.
const SID: &str = "sid";
/// A file in the root: its list of packages, then each package's version.
const STAMP: &str = "sterna-root";

/// The description of a root that can be built.
#[derive(Debug)]
pub struct Plan {
    /// Name of the directory under `target/roots`.
    pub name: &'static str,
    /// Debian's name of the release.
    suite: &'static str,
    packages: &'static [&'static str],
    /// A user and a group of the same name that the programs need, with their number.
    user: Option<(&'static str, u32)>,
    /// Packages whose versions the closing lines report.
    judges: &'static [&'static str],
}

/// QEMU, a busybox for its guests, and the lab VM's programs.
///
/// The lab needs programs for RDMA and for its Linux guest.
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
    user: None,
    judges: &["qemu-system-x86"],
};
/// The programs on the disk of the lab's Linux guest.
pub const GUEST: Plan = Plan {
    name: "guest",
    suite: "trixie",
    packages: &["busybox-static", "e2fsprogs", "fio", "iperf3", "stress-ng"],
    user: None,
    judges: &[],
};
/// libvirt's QEMU driver, with every compressor that its save images can use.
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
    user: Some(("libvirt-qemu", 64055)),
    judges: &["libvirt-daemon-driver-qemu", "qemu-system-x86"],
};
/// Debian 12's QEMU, 7.2: without `file:` and mapped-ram, and with the multifd of versions before
/// 8.
pub const QEMU_BOOKWORM: Plan = Plan {
    name: "qemu-bookworm",
    suite: "bookworm",
    packages: &["qemu-system-x86"],
    user: None,
    judges: &["qemu-system-x86"],
};
/// Debian 13's QEMU, version 10.0.
pub const QEMU_TRIXIE: Plan = Plan {
    name: "qemu-trixie",
    suite: "trixie",
    packages: &["qemu-system-x86"],
    user: None,
    judges: &["qemu-system-x86"],
};
/// etcd, which the tests use as an arbiter of claims.
pub const ETCD: Plan =
    Plan { name: "etcd", suite: "trixie", packages: &["etcd-server"], user: None, judges: &["etcd-server"] };
const ALL: [&Plan; 6] = [&QEMU, &LIBVIRT, &QEMU_BOOKWORM, &QEMU_TRIXIE, &GUEST, &ETCD];

/// Builds all Debian roots, or the named root: `cargo xtask roots [NAME]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if arguments == [versitygw::NAME] {
        let (mut parts, mut notes) = (Parts::default(), Vec::new());
        parts.part("root versitygw", || {
            Ok(versitygw::build().map_or_else(Outcome::Skipped, |note| {
                notes.push(note);
                Outcome::Passed
            }))
        });
        notes.into_iter().for_each(|note| parts.note(note));
        return parts.finish();
    }
    let chosen: Vec<&Plan> = match arguments {
        [] => ALL.to_vec(),
        [name] => ALL.into_iter().filter(|plan| plan.name == name).collect(),
        _ => Vec::new(),
    };
    if chosen.is_empty() {
        let names = ALL.into_iter().map(|plan| plan.name).chain([versitygw::NAME]);
        let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
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

/// The job that builds all roots, in parallel with other jobs. It has a long limit, because it may
/// download every root.
pub fn job() -> Job {
    Job { limit: suite::DOWNLOAD_LIMIT, ..Job::of_ours("roots", &["roots"]) }
}

/// The job that builds one root.
pub fn job_of(plan: &Plan) -> Job {
    Job { limit: suite::DOWNLOAD_LIMIT, ..Job::of_ours("roots", &["roots", plan.name]) }
}

/// The directory of the roots: `STERNA_ROOTS` if set, otherwise under the target directory.
pub fn directory() -> PathBuf {
    std::env::var_os("STERNA_ROOTS").map_or_else(|| target_directory().join("roots"), PathBuf::from)
}

/// A complete root, with its packages' versions.
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

/// Major and minor version, for example `11.1` of `1:11.1.3+ds-1`.
fn minor(version: &str) -> String {
    let upstream = version.split_once(':').map_or(version, |(_, rest)| rest);
    let numbers = upstream.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
    numbers.split('.').take(2).collect::<Vec<_>>().join(".")
}

/// Returns the root, and builds it first if necessary. The error text explains why it is
/// unavailable.
fn build(plan: &'static Plan) -> Result<Root> {
    let place = target_directory().join("roots").join(plan.name);
    if let Some(root) = stamped(plan, &place) {
        return Ok(root);
    }
    setup::ensure(&[BUILDER])?;
    let mirror = mirror::of_this_host()?;
    std::fs::create_dir_all(place.parent().unwrap_or(&place)).map_err(|e| said(&place, &e))?;
    let aside = Aside::beside(&place)?;
    let versions = fill(plan, &mirror, &aside.0)?;
    write_stamp(plan, &versions, &aside.0)?;
    // An existing directory here is an unfinished root, or a root with another list of packages.
    if place.exists() {
        std::fs::remove_dir_all(&place).map_err(|e| said(&place, &e))?;
    }
    std::fs::rename(&aside.0, &place).map_err(|e| said(&place, &e))?;
    stamped(plan, &place).ok_or_else(|| format!("{} was built without its stamp", place.display()))
}

fn write_stamp(plan: &Plan, versions: &[(String, String)], directory: &Path) -> Result<()> {
    let mut text = format!("{}\n", plan.packages.join(" "));
    text.extend(versions.iter().map(|(package, version)| format!("{package} {version}\n")));
    let path = directory.join(STAMP);
    std::fs::write(&path, text).map_err(|e| said(&path, &e))
}

/// The root at that place, if its stamp has this list of packages.
fn stamped(plan: &'static Plan, place: &Path) -> Option<Root> {
    let text = std::fs::read_to_string(place.join(STAMP)).ok()?;
    let (packages, versions) = text.split_once('\n')?;
    let pair = |line: &str| line.split_once(' ').map(|(name, version)| (name.to_owned(), version.to_owned()));
    (packages == plan.packages.join(" "))
        .then(|| Root { plan, versions: versions.lines().filter_map(pair).collect() })
}

/// A directory that is being filled. A drop removes it, unless it was renamed.
struct Aside(PathBuf);

impl Aside {
    /// Creates the directory. Also removes directories that killed runs have left.
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
