//! `sterna demo --linux`: boots the host's own kernel in the reference machine, with this executable as its
//! init.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cpio::Archive;
use crate::exit::Stop;
use crate::linux_guest::{self, LIBRARIES, ticks};
use crate::record::Check;

/// Time limit for the boot of a kernel, also with nested virtualisation.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Steps of the guest that are checked after its arrival. In this time it writes all of its memory twice.
const STEPS: usize = 16;

/// A Linux guest for the demo: its kernel, its initrd and its console logs.
pub(super) struct Linux {
    kernel: PathBuf,
    initrd: PathBuf,
    /// Console output at the source, and at the destination.
    consoles: [PathBuf; 2],
}

impl Linux {
    /// Writes the initrd to `directory`. Without `kernel`, the host's running kernel is used.
    pub(super) fn prepare(kernel: Option<&Path>, directory: &Path) -> Result<Self, Stop> {
        if !has_hardware_virtualisation() {
            return Err(Stop::failed(
                "this host's CPU has no hardware virtualisation (neither vmx nor svm in /proc/cpuinfo), so its KVM boots no \
                 Linux. Leave `--linux` out: the demo's own guest runs here.",
            ));
        }
        let kernel = match kernel {
            Some(kernel) => kernel.to_path_buf(),
            None => running_kernel()?,
        };
        let initrd = directory.join("initrd");
        let failed =
            |error: std::io::Error| Stop::failed(format!("cannot create the guest's initrd: {error}"));
        let archive = archive().map_err(failed)?;
        std::fs::write(&initrd, archive).map_err(failed)?;
        let consoles = ["source", "destination"].map(|name| directory.join(format!("{name}.console")));
        Ok(Self { kernel, initrd, consoles })
    }

    /// Arguments of `sterna run` for one side.
    pub(super) fn arguments(&self, incoming: bool) -> Vec<String> {
        let mut line = vec![format!("--serial={}", self.consoles[usize::from(incoming)].display())];
        if incoming {
            line.push("--incoming=defer".into());
        } else {
            line.push(format!("--kernel={}", self.kernel.display()));
            line.push(format!("--initrd={}", self.initrd.display()));
            line.push(format!("--append={}", linux_guest::command_line()));
        }
        line
    }

    /// Waits until the guest has booted and written all of its memory.
    pub(super) fn wait_for_life(&self) -> Result<(), Stop> {
        self.wait_for(0, STEPS).map(drop)
    }

    /// Checks that the step numbers continue after the migration, and that no word of memory was wrong.
    pub(super) fn prove(&self) -> Result<Check, Stop> {
        let (before, after) = (ticks(&self.consoles[0]), self.wait_for(1, STEPS)?);
        let all: Vec<_> = before.iter().chain(&after).copied().collect();
        let gap = (1u64..).zip(&all).find(|(expected, (number, _))| number != expected);
        let wrong = all.last().map_or(0, |(_, wrong)| *wrong);
        let (passed, summary) = match gap {
            Some((expected, (number, _))) => {
                (false, format!("step {number} arrived instead of step {expected}"))
            }
            None if wrong > 0 => (false, format!("{wrong} words of the guest's memory were wrong")),
            None => {
                let (here, there) = (before.len(), after.len());
                (
                    true,
                    format!(
                        "{here} steps at the source and {there} at the destination, none lost, no word wrong"
                    ),
                )
            }
        };
        Ok(Check { passed, summary })
    }

    fn wait_for(&self, side: usize, count: usize) -> Result<Vec<(u64, u64)>, Stop> {
        let deadline = Instant::now() + BOOT_LIMIT;
        loop {
            let found = ticks(&self.consoles[side]);
            if found.len() >= count {
                return Ok(found);
            }
            if Instant::now() > deadline {
                let said = std::fs::read(&self.consoles[side]).unwrap_or_default();
                let last = String::from_utf8_lossy(&said).lines().last().unwrap_or("nothing").to_owned();
                return Err(Stop::failed(format!(
                    "the Linux guest made {} of {count} steps in {BOOT_LIMIT:?}; the last output of its console: \
                     {last}",
                    found.len()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn has_hardware_virtualisation() -> bool {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.split_whitespace().any(|word| word == "vmx" || word == "svm")
}

fn running_kernel() -> Result<PathBuf, Stop> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let places = [format!("/boot/vmlinuz-{release}"), format!("/lib/modules/{release}/vmlinuz")];
    let found = places.iter().map(PathBuf::from).find(|path| path.is_file());
    found.ok_or_else(|| {
        Stop::usage(format!(
            "no kernel to boot: neither {} nor {} exists. Give a kernel with --kernel.",
            places[0], places[1]
        ))
    })
}

/// An initrd with this executable as init, and with the libraries that it has loaded.
fn archive() -> std::io::Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.file("init", &std::fs::read(std::env::current_exe()?)?);
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let is_library = |path: &&str| path.rsplit('/').next().is_some_and(|name| name.contains(".so"));
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).filter(is_library);
    for path in paths.collect::<BTreeSet<_>>() {
        let name = path.rsplit('/').next().unwrap_or(path);
        archive.file(&format!("{}/{name}", LIBRARIES.trim_start_matches('/')), &std::fs::read(path)?);
    }
    Ok(archive.finish())
}
