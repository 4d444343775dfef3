//! Time, commit, machine and command of a measurement.

use std::fmt;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// The line above a table.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Date and time, such as `2026-11-21 18:26`, UTC.
    pub date: String,
    /// The newest commit, with `+` if files differ from it.
    pub commit: String,
    /// Processors, memory and kernel.
    pub machine: String,
    /// The command that repeats the measurement.
    pub command: String,
}

impl Measured {
    /// Describes a measurement by this program, the bench `name`, at this time on this machine.
    pub fn now(name: &str) -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self {
            date: date(seconds),
            commit: commit(),
            machine: machine(),
            command: command(name, std::env::args().skip(1)),
        }
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { date, commit, machine, command } = self;
        write!(f, "{date} UTC, commit `{commit}`. {machine}. `{command}`.")
    }
}

/// Formats a Unix time as date and time.
fn date(unix_seconds: u64) -> String {
    let (day, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Days since the 1st of March of year 0. All eras of 400 years have the same calendar.
    let day = day + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // from March on
    let day_of_month = day - (153 * month + 2) / 5 + 1;
    let (year, month) =
        (era * 400 + year + u64::from(month >= 10), if month < 10 { month + 3 } else { month - 9 });
    format!("{year}-{month:02}-{day_of_month:02} {:02}:{:02}", second / 3600, second / 60 % 60)
}

fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".into() };
    let is_changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|files| !files.is_empty());
    if is_changed { format!("{commit}+") } else { commit }
}

fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let processor = value(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown processor".into());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = value(&read("/proc/meminfo"), "MemTotal");
    let kib: f64 = memory.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0);
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{cores} cores of {processor}, {:.0} GiB RAM, Linux {}", kib / 1048576.0, kernel.trim())
}

/// The command line without the options for output files and without `--sterna`.
fn command(name: &str, arguments: impl Iterator<Item = String>) -> String {
    const LEFT_OUT: [&str; 3] = ["--json", "--markdown", "--sterna"];
    let (mut words, mut arguments) = (Vec::new(), arguments);
    while let Some(word) = arguments.next() {
        if LEFT_OUT.contains(&word.as_str()) {
            arguments.next();
        } else if !LEFT_OUT.iter().any(|left_out| word.starts_with(&format!("{left_out}="))) {
            words.push(word);
        }
    }
    let all = if words.is_empty() { String::new() } else { format!(" -- {}", words.join(" ")) };
    format!("cargo xtask bench {name}{all}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn date_knows_leap_years_and_the_ends_of_years() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00"),
            (951_782_400, "2000-02-29 00:00"),
            (951_868_799, "2000-02-29 23:59"),
            (1_735_689_599, "2024-12-31 23:59"),
            (1_763_749_560, "2025-11-21 18:26"),
            (4_107_542_400, "2100-03-01 00:00"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn command_is_without_what_says_where_results_go() {
        let command = |line: &str| command("qemu", line.split_whitespace().map(str::to_owned));

        let all = command("--sterna target/release/sterna --only live --json a --markdown=b --ram 4096");

        assert_eq!(all, "cargo xtask bench qemu -- --only live --ram 4096");
        assert_eq!(command("--json a"), "cargo xtask bench qemu");
    }
}
