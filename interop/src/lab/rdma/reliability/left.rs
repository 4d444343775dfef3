//! Counts resources, because a migration must leave nothing behind.

use std::time::{Duration, Instant};

use crate::Failure;
use crate::kernel::output;

/// Time limit until threads and adapters have released their resources.
const LIMIT: Duration = Duration::from_secs(60);
/// Resources of an adapter that processes can have.
const RESOURCES: [&str; 4] = ["qp", "cq", "mr", "cm_id"];

/// Numbers of descriptors and threads of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Belongings {
    descriptors: usize,
    threads: usize,
}

impl Belongings {
    /// Counts the resources now.
    pub(super) fn now() -> Self {
        let count = |path| std::fs::read_dir(path).map_or(0, |entries| entries.count());
        Self { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task") }
    }

    /// The maximum of both counts.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
        }
    }

    /// Waits until this process has no more than these resources, and pins no memory.
    pub(super) fn wait_restored(self) -> Result<(), Failure> {
        settled(|| {
            let now = Self::now();
            let pinned = pinned()?;
            if now.descriptors > self.descriptors || now.threads > self.threads {
                let descriptors = names("/proc/self/fd", |path| {
                    std::fs::read_link(path).unwrap_or_default().display().to_string()
                });
                let threads = names("/proc/self/task", |path| {
                    std::fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_owned()
                });
                return Err(format!("left behind: {now:?}, before {self:?} ({descriptors}; {threads})"));
            }
            if pinned == "0" { Ok(()) } else { Err(format!("{pinned} KiB stay pinned")) }
        })
    }
}

/// Waits until no process has a resource of an adapter.
pub(super) fn adapters_are_free() -> Result<(), Failure> {
    settled(|| {
        for resource in RESOURCES {
            let listing = output(std::process::Command::new("rdma").args(["resource", "show", resource]))?;
            // The kernel's own resources belong to no process.
            let lines: Vec<&str> = listing.lines().filter(|line| line.contains(" pid ")).collect();
            if !lines.is_empty() {
                return Err(format!("left behind: {}", lines.join("; ")));
            }
        }
        Ok(())
    })
}

fn pinned() -> Result<String, Failure> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).ok_or("no VmPin")?;
    Ok(line.split_whitespace().next().unwrap_or_default().to_owned())
}

fn names(directory: &str, of: fn(&std::path::Path) -> String) -> String {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| of(&entry.path())).collect::<Vec<_>>().join(", ")
}

fn settled(check: impl Fn() -> Result<(), Failure>) -> Result<(), Failure> {
    let until = Instant::now() + LIMIT;
    loop {
        match check() {
            Err(why) if Instant::now() > until => return Err(why),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            Ok(()) => return Ok(()),
        }
    }
}
