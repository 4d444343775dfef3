use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;

/// A runner that keeps its files in a directory of its own.
fn runner() -> (Runner, Aside) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("xtask-runner-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let aside = Aside(std::env::temp_dir().join(name));
    (Runner::in_directory(&aside.0).expect("a directory"), aside)
}

struct Aside(PathBuf);

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shell(name: &str, script: &str) -> Job {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    Job::new("tests", name, command)
}

/// A build that prints this message, of a package with these programs.
fn build(aside: &Aside, programs: &[(&str, &str)], message: &serde_json::Value) -> Build {
    let mut command = Command::new("echo");
    command.arg(message.to_string());
    let missing = programs.iter().map(|(package, name)| ((*package).into(), (*name).into())).collect();
    Build::of(command, aside.0.join("messages.json"), missing).expect("a build")
}

fn run(runner: Runner) -> Vec<Done> {
    runner.run(None, |_| Ok(Vec::new())).expect("a report").into_jobs()
}

fn named<'a>(done: &'a [Done], name: &str) -> &'a Done {
    done.iter().find(|done| done.name == name).expect("it ran")
}

#[test]
fn job_that_hangs_ends_with_the_names_of_the_tests_that_ran() {
    let (mut runner, _aside) = runner();
    let script = "echo 'test a ... ok'; sleep 600 & wait";
    let tests = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
    runner.add(Job { tests, limit: Duration::from_millis(300), ..shell("hangs", script) });

    let done = run(runner);

    let why = done[0].result.as_ref().expect_err("a failure");
    assert!(why.contains("did not end within") && why.contains("b, c"), "{why}");
    assert!(!why.contains("c, d"), "{why}");
}

#[test]
fn job_that_waits_for_a_core_is_not_ended_before_many_times_its_limit() {
    let (mut runner, _aside) = runner();
    runner.add(Job { limit: Duration::from_millis(600), ..shell("waits", "sleep 1") });

    let ends = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        // Four threads for each core: the job's time counts at most a quarter, whatever the load of
        // other programs is.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..4 * cores {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let done = run(runner);
        ends.store(true, Ordering::Relaxed);
        done
    });

    assert_eq!(done[0].result, Ok(()), "1 s by the clock is less than 600 ms of free cores");
}

#[test]
fn job_that_must_be_alone_meets_no_other() {
    let (mut runner, aside) = runner();
    let running = aside.0.join("running");
    let claims = format!("mkdir {0} || exit 9; sleep 0.2; rmdir {0}", running.display());
    let looks = format!("sleep 0.1; test ! -e {}", running.display());
    runner.add(Job { beside: Beside::Nothing, ..shell("alone", &claims) });
    runner.add(Job { beside: Beside::Nothing, ..shell("alone too", &claims) });
    (0..4).for_each(|n| runner.add(shell(&format!("other {n}"), &looks)));

    let done = run(runner);

    assert_eq!(done.len(), 6);
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
}

#[test]
fn job_waits_for_the_parts_that_it_comes_after() {
    let (mut runner, aside) = runner();
    let file = aside.0.join("made").display().to_string();
    runner.add(shell("later", &format!("cat {file}")).after(&["roots"]));
    runner.add(Job { part: "roots", ..shell("first", &format!("sleep 0.2; echo 'SKIPPED x: y' > {file}")) });

    let done = run(runner);

    assert_eq!(named(&done, "later").result, Ok(()));
    assert_eq!(named(&done, "later").notes, ["SKIPPED x: y"]);
}

#[test]
fn jobs_that_need_a_build_that_failed_are_not_run() {
    let (mut runner, _aside) = runner();
    runner.add(Job { part: "build", ..shell("build", "exit 1") });
    runner.add(shell("needs it", "exit 0").after(&["build"]));

    let done = run(runner);

    assert_eq!(named(&done, "needs it").result, Err("not run: build failed".into()));
}

#[test]
fn program_that_is_not_there_is_a_failure() {
    let (mut runner, _aside) = runner();
    runner.add(Job::new("tests", "gone", Command::new("/nowhere/at/all")));

    assert!(run(runner)[0].result.as_ref().is_err_and(|why| why.contains("cannot start")));
}

#[test]
fn jobs_get_fixed_seeds() {
    let (mut runner, _aside) = runner();
    runner.add(shell("seeds", "test -n \"$STERNA_SEED\" && test -n \"$PROPTEST_RNG_SEED\""));

    assert_eq!(run(runner)[0].result, Ok(()));
}

#[test]
fn program_whose_tests_cannot_be_listed_is_a_failure_and_the_others_run() {
    let (mut runner, aside) = runner();
    let message = serde_json::json!({"reason": "compiler-artifact", "profile": {"test": true},
        "manifest_path": "/w/a/Cargo.toml", "package_id": "path+file:///w/a#0.1.0",
        "target": {"kind": ["lib"], "name": "a"}, "executable": "/nowhere/at/all"});
    let build = build(&aside, &[], &message);
    runner.add(shell("other", "exit 0"));

    let done = runner.run(Some(build), |binary| binary.jobs()).expect("a report").into_jobs();

    assert!(named(&done, "a a").result.as_ref().is_err_and(|why| why.contains("cannot start")));
    assert_eq!(named(&done, "other").result, Ok(()));
}

#[test]
fn tests_whose_program_is_never_built_are_a_failure() {
    let (runner, aside) = runner();
    let message = serde_json::json!({"reason": "compiler-artifact", "profile": {"test": true},
        "manifest_path": "/w/a/Cargo.toml", "package_id": "path+file:///w/a#0.1.0",
        "target": {"kind": ["test"], "name": "engine"}, "executable": "/bin/true"});
    let build = build(&aside, &[("a", "a")], &message);

    let done = runner.run(Some(build), |binary| binary.jobs()).expect("a report").into_jobs();

    assert!(named(&done, "a engine").result.as_ref().is_err_and(|why| why.contains("did not come")));
}

/// A test program that fails until it has run `fails` times, with this output of libtest.
fn failing(aside: &Aside, name: &str, fails: u32, tests: &[&str]) -> Job {
    let (program, runs) = (aside.0.join(name), aside.0.join(format!("{name}.runs")));
    let list: String = tests.iter().map(|test| format!("    {test}\\n")).collect();
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> {runs}\n[ $(wc -l < {runs}) -gt {fails} ] && exit 0\n\
         printf '\\nfailures:\\n{list}\\ntest result: FAILED. 4 passed; {} failed; 0 ignored\\n'\nexit 101\n",
        tests.len(),
        runs = runs.display(),
    );
    std::fs::write(&program, script).expect("a script");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&program, mode).expect("a program");
    let tests = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
    Job { tests, ..Job::new("tests", name, Command::new(&program)) }
}

#[test]
fn test_that_passes_alone_is_unstable_and_no_failure() {
    let (mut runner, aside) = runner();
    runner.add(failing(&aside, "rare", 1, &["b"]));
    runner.add(shell("other", "exit 0"));

    let done = run(runner);

    let rare = named(&done, "rare");
    assert_eq!(rare.result, Ok(()));
    assert_eq!((rare.counts.passed, rare.counts.failed), (5, 0));
    assert!(rare.notes[0].starts_with("UNSTABLE b: "), "{:?}", rare.notes);
    let runs = std::fs::read_to_string(aside.0.join("rare.runs")).expect("its runs");
    assert_eq!(runs, format!("\n{}", "--test-threads=1 --exact b\n".repeat(3)));
}

#[test]
fn test_that_fails_again_and_many_that_fail_at_once_are_failures() {
    let (mut runner, aside) = runner();
    for (name, fails, tests) in
        [("always", 9, &["a"][..]), ("often", 2, &["a"]), ("many", 1, &["a", "b", "c"])]
    {
        runner.add(failing(&aside, name, fails, tests));
    }

    let done = run(runner);

    assert_eq!(done.len(), 3);
    assert!(done.iter().all(|done| done.result.is_err() && done.notes.is_empty()), "{done:?}");
}
