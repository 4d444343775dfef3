//! The kernel's statistics of cores and processes.

use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process;

/// The interval over which the idle time is measured.
const WINDOW: Duration = Duration::from_millis(400);

/// The idle share of the cores in the last interval.
#[derive(Debug)]
pub struct Load {
    taken: Instant,
    ticks: (u64, u64),
    idle: f64,
}

impl Load {
    pub fn new() -> Self {
        Self { taken: Instant::now(), ticks: ticks(), idle: 0.0 }
    }

    /// The idle share of all cores' time in the last complete interval, 0 to 1.
    pub fn idle(&mut self) -> f64 {
        if self.taken.elapsed() >= WINDOW {
            let (idle, all) = ticks();
            let passed = all.saturating_sub(self.ticks.1).max(1);
            self.idle = idle.saturating_sub(self.ticks.0) as f64 / passed as f64;
            (self.taken, self.ticks) = (Instant::now(), (idle, all));
        }
        self.idle
    }

    /// Restarts the measurement. After the start of a program, the earlier idle time is no longer
    /// meaningful.
    pub fn forget(&mut self) {
        (self.taken, self.ticks, self.idle) = (Instant::now(), ticks(), 0.0);
    }
}

/// Idle ticks of all cores, and all ticks (proc_stat(5)).
fn ticks() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    let numbers: Vec<u64> = first.split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    let idle = numbers.iter().skip(3).take(2).sum();
    // The first two fields already include the time of guests.
    (idle, numbers.iter().take(8).sum())
}

/// Memory in KiB that is available without swapping (proc_meminfo(5)).
pub fn free_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Processor time of a process, and of its children for which it has waited.
pub fn cpu_of(pid: u32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain any character and ends at the last parenthesis. State and numbers follow
    // (proc_pid_stat(5)).
    let rest = text.rsplit_once(") ")?.1;
    let ticks: u64 = rest.split(' ').skip(11).take(4).filter_map(|n| n.parse::<u64>().ok()).sum();
    Some(Duration::from_millis(ticks * 10))
}

/// Kills a process and all its descendants.
pub fn kill_tree(pid: u32) {
    let parents = parents();
    let mut tree = vec![pid];
    let mut at = 0;
    while at < tree.len() {
        let parent = tree[at];
        tree.extend(parents.iter().filter(|(_, p)| **p == parent).map(|(child, _)| *child));
        at += 1;
    }
    let pids: Vec<String> = tree.iter().map(u32::to_string).collect();
    process::succeeds(Command::new("sh").arg("-c").arg(format!("kill -KILL {}", pids.join(" "))));
}

/// The parent of each process.
fn parents() -> HashMap<u32, u32> {
    let of = |pid: u32| -> Option<u32> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        text.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, of(pid)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kill_tree_ends_children_too() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = String::new();
        let out = shell.stdout.take().expect("asked for");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a number");
        let child: u32 = line.trim().parse().expect("a pid");

        kill_tree(shell.id());

        assert!(!shell.wait().expect("its end").success());
        // The parent may be gone, so that the child may stay a zombie.
        let stat = || std::fs::read_to_string(format!("/proc/{child}/stat"));
        while stat().is_ok_and(|text| !text.contains(") Z ")) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn free_memory_is_known() {
        assert!(free_kib() > 0);
    }

    #[test]
    fn cpu_of_this_process_is_known() {
        assert!(cpu_of(std::process::id()).is_some());
        assert!(cpu_of(0).is_none());
    }
}
