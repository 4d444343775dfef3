//! Describes the state of a QEMU. The failure message of a test that timed out contains it.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::{PATIENCE, Qemu};

/// Time limit of the answer of a working monitor.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time between the two readings that show which threads use CPU time.
const BETWEEN: Duration = Duration::from_millis(500);

impl Qemu {
    /// Describes the guest, the migration and each thread, as lines. A monitor that does not answer is
    /// reported as silent. Its connection is unusable afterwards.
    pub fn describe_state(&mut self) -> String {
        let mut lines = format!("QEMU {}:\n", self.pid());
        let before = threads(self.pid());
        std::thread::sleep(BETWEEN);
        for thread in threads(self.pid()) {
            let used = before
                .iter()
                .find(|old| old.id == thread.id)
                .map_or(0, |old| thread.ticks.saturating_sub(old.ticks));
            // Writing to a string does not fail.
            let _ = writeln!(lines, "  {}, {used} ticks in {BETWEEN:?}, {}", thread.name, thread.place);
        }
        self.monitor.set_limit(ANSWER_LIMIT);
        for command in ["query-status", "query-migrate", "query-colo-status"] {
            let answer = self.execute(command, Value::Null);
            let _ = match &answer {
                Ok(answer) => writeln!(lines, "  {command}: {answer}"),
                Err(error) => writeln!(lines, "  {command}: {error}"),
            };
            if answer.is_err() {
                break;
            }
        }
        self.monitor.set_limit(PATIENCE);
        lines
    }
}

/// A thread of a process.
struct Thread {
    id: String,
    name: String,
    /// CPU time so far, in ticks.
    ticks: u64,
    /// State of the thread, and where in the kernel it waits.
    place: String,
}

fn threads(pid: u32) -> Vec<Thread> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    tasks.flatten().map(|task| thread(&task.path())).collect()
}

fn thread(task: &Path) -> Thread {
    let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default().trim().to_owned();
    let stat = read("stat");
    // The name may contain blanks and parentheses. proc(5) counts the state after it as the third field.
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default();
    let time = |number: usize| field(number).parse::<u64>().unwrap_or_default();
    let id = task.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stack = read("stack").lines().take(4).collect::<Vec<_>>().join(" ");
    Thread {
        id,
        name: read("comm"),
        ticks: time(14) + time(15),
        place: format!("state {}, system call {}, stack {stack}", field(3), read("syscall")),
    }
}
