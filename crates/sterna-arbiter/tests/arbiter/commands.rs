//! `exec:` and fences: the meaning of each exit status and failure.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use sterna_arbiter::{ClaimError, CommandLine, Fence, FenceError, Identity, Ruling};
use tempfile::TempDir;

use crate::{PATIENCE, claim, open};

/// Claims with a shell script as the arbiter's command.
fn exec(script: &str, limit: Duration) -> Result<Ruling, ClaimError> {
    open(&format!("exec:{}", shell(script)), limit).arbiter.claim(&claim("a", 0x1f))
}

fn fence(script: &str, limit: Duration) -> Result<(), FenceError> {
    Fence::new(shell(script), limit).run(&claim("a", 0x1f))
}

fn shell(script: &str) -> CommandLine {
    CommandLine::new("/bin/sh", ["-c", script])
}

/// Scripts that give neither a ruling nor a success, and the text that the error must contain.
const FAILURES: &[(&str, &str)] = &[
    ("exit 2", "exited with 2"),
    ("exit 126", "exited with 126"),
    ("exit 255", "exited with 255"),
    ("kill -9 $$", "signal 9"),
    ("kill -15 $$", "signal 15"),
    ("echo 'no \"quorum\"' >&2; exit 3", r#"its output: "no \"quorum\"""#),
    ("i=0; while [ $i -lt 9999 ]; do echo 0123456789 >&2; i=$((i+1)); done; echo last >&2; exit 3", "last\""),
];

#[test]
fn exec_0_is_won_and_1_is_lost() {
    assert_eq!(exec("exit 0", PATIENCE), Ok(Ruling::Won));
    assert_eq!(exec("exit 1", PATIENCE), Ok(Ruling::Lost { winner: None }));
    assert_eq!(exec("echo loud; echo loud >&2; cat", PATIENCE), Ok(Ruling::Won), "there is nothing to read");
}

#[test]
fn exec_that_ends_otherwise_is_no_ruling() {
    for (script, what) in FAILURES {
        let error = exec(script, PATIENCE).expect_err(script);
        assert!(!error.is_contradictory() && error.to_string().contains(what), "{script}: {error}");
    }
}

#[test]
fn fence_succeeds_only_by_0() {
    assert_eq!(fence("exit 0", PATIENCE), Ok(()));
    for (script, what) in [&[("exit 1", "exited with 1")], FAILURES].concat() {
        let error = fence(script, PATIENCE).expect_err(script).to_string();
        assert!(
            error.contains(what) && error.contains("does not start here until the fence succeeds"),
            "{script}: {error}"
        );
        // A standby has no command that decides.
        assert!(!error.contains("decide"), "{script}: {error}");
    }
}

#[test]
fn program_that_cannot_be_started_is_no_ruling_and_no_success() {
    for (program, what) in [("/nowhere/at/all", "No such file"), ("/dev/null", "Permission denied")] {
        let error =
            open(&format!("exec:{program}"), PATIENCE).arbiter.claim(&claim("a", 1)).expect_err(program);
        assert!(error.to_string().contains(what), "{error}");
        let fence = Fence::new(program.parse().expect("a command"), PATIENCE);
        let error = fence.run(&claim("a", 1)).expect_err(program);
        assert!(error.problem.contains(what), "{error}");
    }
}

#[test]
fn command_is_told_the_claim_and_no_shell_is_between() {
    let told = "test \"$STERNA_CLAIM_GUEST/$STERNA_CLAIM_GENERATION/$STERNA_CLAIM_ROLE/$STERNA_CLAIM_PROCESS\" = \
                guest/31/standby/a || exit 9";
    assert_eq!(exec(told, PATIENCE), Ok(Ruling::Won));
    assert_eq!(fence(told, PATIENCE), Ok(()));
    let spec = r#"exec:/bin/sh -c 'test "$0" = "\$HOME*"' $HOME*"#;
    assert_eq!(open(spec, PATIENCE).arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
}

#[test]
fn command_that_hangs_is_killed_with_its_group() {
    let directory = tempfile::tempdir().expect("a directory");
    // The scripts also ignore signals, close their output, or write without end.
    for script in [
        "sleep 1000",
        "trap '' TERM INT HUP; sleep 1000",
        "exec 2>&-; sleep 1000",
        "while :; do echo x >&2; done",
    ] {
        let mut limit = Duration::from_millis(200);
        let (error, child) = loop {
            let pid_file = directory.path().join("pid");
            let script =
                format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; {script}", pid_file.display());
            let error = exec(&script, limit).expect_err("no ruling");
            // On a busy machine the script may not have written the file before the limit.
            match std::fs::read_to_string(&pid_file) {
                Ok(pid) => break (error, pid.trim().parse().expect("a number")),
                Err(_) => limit *= 2,
            }
        };
        assert!(!error.is_contradictory() && error.to_string().contains("and was killed"), "{error}");
        assert_gone(child);
        std::fs::remove_file(directory.path().join("pid")).expect("removed");
    }
    let error = fence("sleep 1000", Duration::from_millis(50)).expect_err("no success");
    assert!(error.problem.contains("and was killed"), "{error}");
}

fn assert_gone(process: i32) {
    let began = Instant::now();
    let runs = || {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // A process without a parent may never be reaped.
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
    };
    while runs() {
        assert!(began.elapsed() < PATIENCE, "process {process} lives");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn children_that_a_command_leaves_behind_are_not_waited_for() {
    let directory = TempDir::new().expect("a directory");
    let pid_file = directory.path().join("pid");
    let began = Instant::now();

    // The child process inherits and keeps the command's standard error.
    let ruling = exec(&format!("sleep 1000 & echo $! > {}; exit 0", pid_file.display()), PATIENCE * 4);

    let pid = std::fs::read_to_string(pid_file).expect("a number").trim().parse().expect("a number");
    let pid = Pid::from_raw(pid).expect("a process");
    let lives = test_kill_process(pid);
    kill_process(pid, Signal::KILL).expect("killed");
    assert_eq!((ruling, lives), (Ok(Ruling::Won), Ok(())));
    assert!(began.elapsed() < PATIENCE * 2, "it was waited for");
}

#[test]
fn command_that_rules_otherwise_the_second_time_is_not_trusted() {
    let directory = TempDir::new().expect("a directory");
    let script = format!("mkdir {}/first", directory.path().display());
    // mkdir exits with 1 if the directory exists, so the second ruling is `lost`.
    let arbiter = open(&format!("exec:{}", shell(&script)), PATIENCE).arbiter;

    assert_eq!(arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
    let error = arbiter.claim(&claim("a", 1)).expect_err("a contradiction");

    assert!(error.is_contradictory(), "{error}");
    let guest = claim("a", 1).guest;
    assert_eq!(arbiter.identity(&guest, claim("a", 1).generation), Ok(Identity::Unknown));
}
