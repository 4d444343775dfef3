//! Repeated demo migrations, each of which is checked.

use std::process::Command;
use std::time::Instant;

use serde_json::Value;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::suite;
use crate::workspace::target_directory;

/// `cargo xtask demo-loop N [--built] [-- ARGS]`. ARGS are passed to `sterna demo`. `--built` uses
/// the tests' program without a new build.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (ours, theirs) = split_at_dashes(arguments);
    let (count, built) = match ours {
        [count] => (count, false),
        [count, option] if option == "--built" => (count, true),
        _ => return Err(Failure::Usage("demo-loop takes one number, and `--built`".into())),
    };
    let count = count.parse().map_err(|_| Failure::Usage(format!("`{count}` is no count")))?;
    let mut parts = Parts::default();
    parts.part("demo", || run(count, theirs, built));
    parts.finish()
}

/// Runs the demo `count` times. Each run must succeed and report that its guest was checked.
fn run(count: u64, arguments: &[String], built: bool) -> Result<Outcome> {
    let program = if built {
        suite::built_program("sterna")
    } else {
        let mut build = process::cargo();
        build.args(["build", "--quiet", "--release", "--package", "sterna-cli", "--bin", "sterna"]);
        process::run(&mut build)?;
        target_directory().join("release").join("sterna")
    };
    let began = Instant::now();
    let (mut downtimes, mut machine) = (Vec::new(), String::new());
    for number in 1..=count {
        let demo = one(&mut Command::new(&program), arguments)
            .map_err(|why| format!("demo {number} of {count}: {why}"))?;
        downtimes.push(demo.downtime_seconds);
        machine = demo.machine;
        if number % 10 == 0 || number == count {
            println!("{number} of {count} demos, each checked; {:.1} s", began.elapsed().as_secs_f64());
        }
    }
    downtimes.sort_by(f64::total_cmp);
    if let (Some(first), Some(last)) = (downtimes.first(), downtimes.last()) {
        let median = downtimes[downtimes.len() / 2];
        println!(
            "demo-loop: ok. {count} passed on the {machine} machine; downtime {:.1} / {:.1} / {:.1} ms \
             (least / median / most)",
            first * 1e3,
            median * 1e3,
            last * 1e3
        );
    }
    Ok(Outcome::Passed)
}

struct Demo {
    downtime_seconds: f64,
    machine: String,
}

fn one(program: &mut Command, arguments: &[String]) -> Result<Demo> {
    let text = process::output(program.args(["demo", "--json"]).args(arguments))?;
    let said: Value = serde_json::from_str(&text).map_err(|error| format!("no JSON on stdout: {error}"))?;
    if said["check"]["passed"] != true {
        return Err(format!("the guest was not found whole: {}", said["check"]));
    }
    Ok(Demo {
        downtime_seconds: said["statistics"]["downtime"].as_f64().ok_or("the demo reports no downtime")?,
        machine: said["machine"].as_str().unwrap_or_default().to_owned(),
    })
}

/// The arguments before the first `--`, and the arguments after it.
pub fn split_at_dashes(arguments: &[String]) -> (&[String], &[String]) {
    match arguments.iter().position(|argument| argument == "--") {
        Some(at) => (&arguments[..at], &arguments[at + 1..]),
        None => (arguments, &[]),
    }
}
