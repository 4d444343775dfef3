//! Counts the resources of this process, because a migration must leave nothing behind.

use std::time::{Duration, Instant};

use crate::mappings::Mappings;

/// Descriptors, threads and mappings of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Belongings {
    /// Number of open descriptors.
    pub descriptors: usize,
    /// Number of threads.
    pub threads: usize,
    /// Mapped memory, without the memory that the C library keeps for reuse.
    pub mappings: Mappings,
}

impl Belongings {
    /// Counts the resources now.
    pub fn now() -> Self {
        let count = |path| std::fs::read_dir(path).map_or(0, |entries| entries.count());
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            mappings: Mappings::now(),
        }
    }

    /// The same counts without a limit of mappings, because running threads allocate and free buffers.
    pub fn and_any_mappings(self) -> Self {
        Self { mappings: Mappings::ANY, ..self }
    }

    /// Waits until the process has no more resources than `self`. Threads need a moment to end.
    ///
    /// # Errors
    /// The resources that remain after `limit`.
    pub fn wait_restored(self, limit: Duration) -> Result<(), String> {
        let until = Instant::now() + limit;
        loop {
            let now = Self::now();
            if now.descriptors <= self.descriptors
                && now.threads <= self.threads
                && now.mappings.is_within(&self.mappings)
            {
                return Ok(());
            }
            if Instant::now() > until {
                let names = |path: &str, of: fn(&std::path::Path) -> String| {
                    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
                    entries.map(|entry| of(&entry.path())).collect::<Vec<_>>().join(", ")
                };
                let link = |path: &std::path::Path| {
                    std::fs::read_link(path).unwrap_or_default().display().to_string()
                };
                let comm = |path: &std::path::Path| {
                    std::fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_owned()
                };
                return Err(format!(
                    "left behind: {} descriptors, before {} ({}); {} threads, before {} ({}); {}, before {}",
                    now.descriptors,
                    self.descriptors,
                    names("/proc/self/fd", link),
                    now.threads,
                    self.threads,
                    names("/proc/self/task", comm),
                    now.mappings,
                    self.mappings,
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Resident memory of this process, in bytes.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.unwrap_or(0) << 10
}
