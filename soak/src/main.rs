//! `soak [--count N] [--seed S]`: N migrations cancelled, cut or killed in every state.
//! `soak --round-trips N [--seed S]`: N migrations of a guest at full speed, each one checked.
//! `soak --rdma N [--seed S]`: N migrations over RDMA, most of them disturbed, on adapters inside the
//! process.
//! `soak --rdma-case NUMBER --seed S`: plays one of them again; a failure prints its number.
//! `soak --colo N [--seed S]`: N disturbed protections: network, VMM, operators, standby, arbiter.
//! `soak --colo-long N [--seed S]`: one protection with N checkpoints, in which nothing may grow.
//! `soak --colo-case NUMBER --seed S`: plays one of them again; a failure prints its number.
//! `soak --kills N [--planted FAULT] [--seed S]`: N protections whose primary, a process, is killed or
//! frozen.
//! `soak --kills-case NUMBER [--planted FAULT] --seed S`: plays one of them again; a failure prints its
//! number.
//! `soak --postcopy N [--seed S]`: N postcopy migrations whose connections are cut or whose sides are killed.
//! `soak --resumed N [--seed S]`: the same for precopies that survive a lost connection.
//! `soak --cuts N [--seed S]`: N precopies that are cut once before they commit, and arrive.
//! `soak --handover N [--seed S]`: N migrations, each cut before, within or after one message of the
//! handover.
//! `soak --postcopy-case NUMBER --seed S`, `--resumed-case`, `--cuts-case`, `--handover-case`: plays one
//! again.
//! `soak --silence [--seed S]`: at every stop, the network swallows all bytes and closes no connection.
//! `soak --only STOP BLOW [--seed S]`: plays one case again; a failure prints its stop and blow.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use sterna_soak::colo::kills;
use sterna_soak::drift::{Drift, HEAPS, LIMIT};
use sterna_soak::{Blow, Case, Soak, Stop, child, colo, outages, rdma, round_trips, schedule, silences};

const USAGE: &str = "usage: soak [--count N | --round-trips N | --silence | --only STOP BLOW | --rdma N | --rdma-case NUMBER | --colo N | --colo-long N | --colo-case NUMBER | --kills N | --kills-case NUMBER | --postcopy N | --postcopy-case NUMBER | --resumed N | --resumed-case NUMBER | --cuts N | --cuts-case NUMBER | --handover N | --handover-case NUMBER] [--planted FAULT] [--seed S]";

/// Exit status that a shell expects of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    sterna_testing::log_from_env();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((_, rest)) = arguments.split_first().filter(|(role, _)| *role == child::ROLE) {
        return exit(child::main(rest).map(|()| ExitCode::SUCCESS));
    }
    if let Some((_, rest)) = arguments.split_first().filter(|(role, _)| *role == kills::primary::ROLE) {
        return exit(kills::primary::main(rest).map(|()| ExitCode::SUCCESS));
    }
    if let Some((_, rest)) = arguments.split_first().filter(|(role, _)| *role == outages::ROLE) {
        return exit(outages::main(rest).map(|()| ExitCode::SUCCESS));
    }
    if let Err(why) = share_one_heap() {
        return exit(Err(why));
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the process immediately.
        let at_once = signal_hook::flag::register_conditional_shutdown(
            signal,
            INTERRUPTED.into(),
            Arc::clone(&interrupted),
        );
        if let Err(error) =
            at_once.and_then(|_| signal_hook::flag::register(signal, Arc::clone(&interrupted)))
        {
            eprintln!("soak: signal {signal}: {error}");
        }
    }
    exit(Wish::parse(&arguments).and_then(|wish| wish.fulfil(interrupted)))
}

/// Starts the program again with one heap for all threads. Resident memory then equals used memory, without
/// free pieces in many heaps. It also disables backtraces of planned panics, because printing one keeps the
/// program's symbols in memory.
fn share_one_heap() -> Result<(), String> {
    if std::env::var_os(HEAPS).is_some() {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|error| format!("where am I? {error}"))?;
    let error = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(HEAPS, "1")
        .env("RUST_BACKTRACE", "0")
        .exec();
    Err(format!("starting again with {HEAPS}: {error}"))
}

fn exit(done: Result<ExitCode, String>) -> ExitCode {
    done.unwrap_or_else(|why| {
        eprintln!("soak: {why}");
        ExitCode::from(2)
    })
}

fn passed(all: bool) -> ExitCode {
    if all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The parsed command line.
struct Wish {
    seed: u64,
    what: What,
    /// A fault that the soak must find.
    planted: Option<kills::Planted>,
}

enum What {
    Cases(u64),
    RoundTrips(u64),
    Silence,
    Only(Stop, Blow),
    Rdma(u64),
    RdmaCase(u64),
    Colo(u64),
    ColoCase(u64),
    ColoLong(u64),
    Kills(std::ops::Range<u64>),
    Outages(outages::Kind, std::ops::Range<u64>),
}

impl Wish {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let number = |text: Option<&String>| {
            let text = text.ok_or(USAGE)?;
            text.parse::<u64>().map_err(|_| format!("`{text}` is no number"))
        };
        let environment = std::env::var("STERNA_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = environment.unwrap_or_else(|| fastrand::u64(..));
        let mut wish = Self { seed, what: What::Cases(1000), planted: None };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--count" => wish.what = What::Cases(number(rest.next())?),
                "--round-trips" => wish.what = What::RoundTrips(number(rest.next())?),
                "--rdma" => wish.what = What::Rdma(number(rest.next())?),
                "--rdma-case" => wish.what = What::RdmaCase(number(rest.next())?),
                "--colo" => wish.what = What::Colo(number(rest.next())?),
                "--colo-case" => wish.what = What::ColoCase(number(rest.next())?),
                "--colo-long" => wish.what = What::ColoLong(number(rest.next())?),
                "--kills" => wish.what = What::Kills(0..number(rest.next())?),
                "--kills-case" => {
                    let number = number(rest.next())?;
                    wish.what = What::Kills(number..number + 1);
                }
                "--planted" => {
                    let fault = rest.next().and_then(|label| kills::Planted::of_label(label));
                    wish.planted = Some(fault.ok_or(USAGE)?);
                }
                "--silence" => wish.what = What::Silence,
                "--seed" => wish.seed = number(rest.next())?,
                "--only" => {
                    let stop = rest.next().and_then(|label| Stop::of_label(label));
                    let blow = rest.next().and_then(|label| Blow::of_label(label));
                    wish.what = What::Only(stop.ok_or(USAGE)?, blow.ok_or(USAGE)?);
                }
                other => {
                    let label = other.strip_prefix("--").ok_or(USAGE)?;
                    let one = label.strip_suffix("-case");
                    let kind = outages::Kind::of_label(one.unwrap_or(label)).ok_or(USAGE)?;
                    let number = number(rest.next())?;
                    let numbers = if one.is_some() { number..number + 1 } else { 0..number };
                    wish.what = What::Outages(kind, numbers);
                }
            }
        }
        Ok(wish)
    }

    fn fulfil(self, interrupted: Arc<AtomicBool>) -> Result<ExitCode, String> {
        let seed = self.seed;
        println!("seed {seed}");
        let cases = match self.what {
            What::RoundTrips(count) => return Ok(passed(trips(count, seed))),
            What::Rdma(count) => return Ok(passed(over_rdma(0..count, seed, &interrupted))),
            What::RdmaCase(number) => return Ok(passed(over_rdma(number..number + 1, seed, &interrupted))),
            What::Colo(count) => return Ok(passed(protections(0..count, seed, &interrupted))),
            What::ColoCase(number) => {
                return Ok(passed(protections(number..number + 1, seed, &interrupted)));
            }
            What::ColoLong(count) => {
                let ended = colo::long(seed, count);
                let said = ended.as_ref().unwrap_or_else(|why| why);
                println!("{said}");
                return Ok(passed(ended.is_ok()));
            }
            What::Kills(numbers) => {
                let program = std::env::current_exe().map_err(|error| format!("where am I? {error}"))?;
                let report = kills::many(&program, numbers, seed, self.planted, &interrupted, |why| {
                    eprintln!("FAILED {why}");
                });
                println!("{report}");
                return Ok(passed(report.is_good()));
            }
            What::Outages(kind, numbers) => {
                return lost_connections(kind, numbers, seed, &interrupted).map(passed);
            }
            What::Cases(count) => schedule(count, seed),
            What::Silence => silences(seed),
            What::Only(stop, blow) => vec![Case { number: 0, stop, blow, seed }],
        };
        let program = std::env::current_exe().map_err(|error| format!("where am I? {error}"))?;
        let count = cases.len();
        let soak = Soak { program, cases, interrupted };
        let mut began = std::time::Instant::now();
        let report = soak.run(|case, result| {
            if let Err(why) = result {
                let (stop, blow) = (case.stop.label(), case.blow.label());
                eprintln!("FAILED case {}: --only {stop} {blow} --seed {}: {why}", case.number, case.seed);
            }
            tracing::info!(?case, took = ?began.elapsed(), "done");
            began = std::time::Instant::now();
            if (case.number + 1).is_multiple_of(100) {
                eprintln!("{} of {count}", case.number + 1);
            }
        });
        println!("{report}");
        if report.interrupted {
            return Ok(ExitCode::from(INTERRUPTED));
        }
        Ok(passed(report.failures.is_empty() && report.drift.grown().is_empty()))
    }
}

fn over_rdma(numbers: std::ops::Range<u64>, seed: u64, interrupted: &AtomicBool) -> bool {
    let (mut good, mut bad) = (0, 0);
    let mut drift = Drift::over(numbers.end - numbers.start);
    for number in numbers {
        if interrupted.load(std::sync::atomic::Ordering::SeqCst) {
            println!("interrupted");
            break;
        }
        match rdma::one(seed, number) {
            Ok(how) => {
                tracing::info!("{how}");
                good += 1;
            }
            Err(why) => {
                eprintln!("FAILED {why}");
                bad += 1;
            }
        }
        drift.played();
    }
    drift.end(LIMIT);
    print!("{drift}");
    println!("{good} passed, {bad} failed");
    bad == 0 && drift.grown().is_empty()
}

fn protections(numbers: std::ops::Range<u64>, seed: u64, interrupted: &AtomicBool) -> bool {
    let (mut ends, mut bad) = (BTreeMap::<(String, String), u64>::new(), 0);
    let mut drift = Drift::over(numbers.end - numbers.start);
    // A first migration opens everything that a process opens once and keeps, before resources are counted.
    if let Err(why) = round_trips::run(1, 0, |_, _| {}) {
        eprintln!("soak: {why}");
        return false;
    }
    for number in numbers {
        if interrupted.load(std::sync::atomic::Ordering::SeqCst) {
            println!("interrupted");
            break;
        }
        match colo::one(seed, number) {
            Ok(played) => {
                tracing::info!(number, "{}: {}", played.what, played.end);
                *ends.entry((played.trouble, played.end)).or_default() += 1;
            }
            Err(why) => {
                eprintln!("FAILED {why}");
                bad += 1;
            }
        }
        drift.played();
    }
    drift.end(LIMIT);
    for ((trouble, end), count) in &ends {
        println!("{trouble:16} {count:5}  {end}");
    }
    print!("{drift}");
    println!("{} passed, {bad} failed", ends.values().sum::<u64>());
    bad == 0 && drift.grown().is_empty()
}

fn lost_connections(
    kind: outages::Kind,
    numbers: std::ops::Range<u64>,
    seed: u64,
    interrupted: &AtomicBool,
) -> Result<bool, String> {
    let program = std::env::current_exe().map_err(|error| format!("where am I? {error}"))?;
    // A first migration opens everything that a process opens once and keeps, before resources are counted.
    round_trips::run(1, 0, |_, _| {})?;
    let report =
        outages::several(kind, seed, numbers, &program, interrupted, |number, played| match played {
            Ok(played) => {
                tracing::info!(number, "{}: {}", played.what, played.end);
                if (number + 1).is_multiple_of(100) {
                    eprintln!("{}", number + 1);
                }
            }
            Err(why) => eprintln!("FAILED {why}"),
        });
    println!("{report}");
    Ok(report.is_good())
}

fn trips(count: u64, seed: u64) -> bool {
    let done = round_trips::run(count, seed, |number, figures| {
        if number.is_multiple_of(20) {
            eprintln!("{number} of {count}: {figures:?}");
        }
    });
    match done {
        Ok(figures) => {
            println!("{figures:?}");
            println!("{} passed, 0 failed", figures.migrations);
            true
        }
        Err(why) => {
            eprintln!("soak: {why}");
            println!("0 passed, 1 failed");
            false
        }
    }
}
