//! Tests of `sterna-fuzz check`, with a target that fails on demand.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn sterna_fuzz(arguments: &[&str], directory: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna-fuzz"));
    command.args(arguments);
    if arguments[0] == "check" {
        command.arg("--seeds").arg(directory.join("seeds"));
        command.arg("--artifacts").arg(directory.join("artifacts"));
    }
    command.output().unwrap()
}

/// Makes a directory with one seed for the self test.
fn with_seed(seed: &[u8]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let seeds = directory.path().join("seeds/self_test");
    fs::create_dir_all(&seeds).unwrap();
    fs::write(seeds.join("one"), seed).unwrap();
    directory
}

/// Runs the check. Returns its report of the failure, and compares the stored artifact with the
/// input.
fn failure_of(seed: &[u8], more: &[&str]) -> String {
    let directory = with_seed(seed);
    let arguments = [&["check", "self_test", "--count", "0"], more].concat();

    let output = sterna_fuzz(&arguments, directory.path());

    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert_eq!(fs::read(directory.path().join("artifacts/self_test/stored-0")).unwrap(), seed, "{said}");
    said
}

#[test]
fn check_of_inputs_that_pass_counts_them() {
    let directory = with_seed(b"harmless");

    let output = sterna_fuzz(&["check", "self_test", "--count", "300"], directory.path());

    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("self_test: ok. 1 stored inputs, 300 of seed 1"), "{said}");
}

#[test]
fn check_of_a_panic_in_any_thread_leaves_the_input() {
    for input in [&b"panic"[..], b"thread"] {
        let said = failure_of(input, &[]);

        assert!(said.contains("self_test found a bug: stored input 0 ended with signal: 6"), "{said}");
        assert!(said.contains("told to"), "{said}");
    }
}

#[test]
fn check_of_an_input_that_takes_too_much_memory_leaves_it() {
    let said = failure_of(b"memory", &[]);

    assert!(said.contains("stored input 0 ended with"), "{said}");
}

#[test]
fn check_of_an_input_that_never_ends_ends_and_leaves_it() {
    let said = failure_of(b"hang", &["--limit", "1"]);

    assert!(said.contains("stored input 0 took more than 1 s"), "{said}");
}

#[test]
fn check_of_a_mutated_input_that_fails_names_seed_and_number_and_can_be_run_again() {
    let directory = with_seed(b"seed input");
    let arguments = ["check", "self_test", "--count", "1000", "--seed", "7"];

    let output = sterna_fuzz(&arguments, directory.path());
    let again = sterna_fuzz(&arguments, directory.path());

    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let found = said.lines().find(|line| line.contains("found a bug")).unwrap();
    assert!(found.contains(" of seed 7 "), "{said}");
    assert!(String::from_utf8_lossy(&again.stderr).contains(found), "{said}");
    let left = fs::read_dir(directory.path().join("artifacts/self_test")).unwrap().next().unwrap().unwrap();
    let content = fs::read(left.path()).unwrap();
    assert!(content.starts_with(b"seed") && content != b"seed input");
    let replayed = sterna_fuzz(&["replay", "self_test", left.path().to_str().unwrap()], directory.path());
    assert!(!replayed.status.success());
}

#[test]
fn check_takes_values_that_are_a_targets_name() {
    let directory = with_seed(b"panic");
    fs::rename(directory.path().join("seeds"), directory.path().join("self_test")).unwrap();
    let line = ["check", "self_test", "--count", "0", "--seeds", "self_test", "--artifacts", "out"];

    let output = Command::new(env!("CARGO_BIN_EXE_sterna-fuzz"))
        .args(line)
        .current_dir(directory.path())
        .output()
        .unwrap();

    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("self_test found a bug: stored input 0 ended with signal: 6"), "{said}");
    assert!(directory.path().join("out/self_test/stored-0").exists(), "{said}");
}

#[test]
fn check_of_an_unknown_target_names_those_that_there_are() {
    let output = sterna_fuzz(&["check", "nothing"], Path::new("."));

    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("multifd_packet"), "{said}");
}
