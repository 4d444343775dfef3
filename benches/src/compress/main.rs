//! Measures what `sterna relay --compress auto` saves on a slow link.
//!
//! - Two `sterna relay` processes in a network namespace, whose loopback has a token bucket. The bench is both VMMs: it
//!   sends a stream and reads what arrives.
//! - **Bytes** are those of the namespace's loopback, with TCP's and IP's heads and acknowledgements.
//! - Streams: random bytes; the stream of a guest (`--stream`, recorded with QEMU's `migrate exec:`); another guest of the
//!   same image (`--second`) through the same relays. Without files, the guests' pages are those of the programs in
//!   `--files`, and the second guest has a fifth of other pages.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod relays;
mod streams;

use std::path::PathBuf;

use clap::Parser;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::link::Link;
use sterna_benches::markdown::{self, Measured};
use sterna_benches::{Failure, goal};

use relays::{Relays, Run};

/// Measures what compression between two relays saves.
#[derive(Parser)]
struct Args {
    /// Rate of the link, MB/s.
    #[arg(long, default_value_t = 50)]
    rate: u64,
    /// Random bytes, MiB.
    #[arg(long, default_value_t = 256)]
    random: usize,
    /// Stream of a QEMU's main channel.
    #[arg(long, value_name = "FILE", requires = "second")]
    stream: Option<PathBuf>,
    /// Stream of another guest of the same image.
    #[arg(long, value_name = "FILE", requires = "stream")]
    second: Option<PathBuf>,
    /// Directory whose files are the guests' pages if there is no stream.
    #[arg(long, value_name = "DIR", default_value = "/usr/lib")]
    files: PathBuf,
    /// `--cache` of the relays.
    #[arg(long, default_value = "512M")]
    cache: String,
    /// The `sterna` command to measure.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write goals and rows to this file, in the form of `benches/RESULTS.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Failure> {
    let link = Link::new(args.rate)?;
    let random = streams::random(args.random << 20);
    let (first, second) = match (&args.stream, &args.second) {
        (Some(first), Some(second)) => (streams::read(first)?, streams::read(second)?),
        _ => streams::of_files(&args.files)?,
    };
    let (known, filled) = streams::share(&first, &second);
    let share = known as f64 / filled.max(1) as f64;

    let mut rows = Vec::new();
    let mut measure = |what: &str, mode: &str, relays: &Relays, stream: &[u8]| -> Result<Run, Failure> {
        let run = relays.carry(stream)?;
        let row = format!(
            "| {what} | {mode} | {:.1} | {:.1} | {:.2} |",
            mib(stream.len() as u64),
            mib(run.bytes),
            run.seconds
        );
        println!("{row}");
        rows.push(row);
        Ok(run)
    };
    println!("{HEAD}");
    let start = |mode: &str| Relays::start(&args.sterna, &link, mode, &args.cache);
    let random_plain = measure("random bytes", "off", &start("off")?, &random)?;
    let random_auto = measure("random bytes", "auto", &start("auto")?, &random)?;
    let plain = measure("first guest", "off", &start("off")?, &first)?;
    let relays = start("auto")?;
    let auto = measure("first guest", "auto", &relays, &first)?;
    let again = measure("second guest, the same relays", "auto", &relays, &second)?;
    drop(relays);
    let second_plain = measure("second guest", "off", &start("off")?, &second)?;
    let second_alone = measure("second guest, other relays", "auto", &start("auto")?, &second)?;

    let allowed = (1.0 - share) * second_plain.bytes as f64;
    let ratio = |one: u64, other: u64| one as f64 / other as f64;
    let goals = [
        Goal::of(
            "random bytes, auto: time against plain",
            random_auto.seconds / random_plain.seconds,
            "",
            Bound::AtMost(1.02),
        ),
        Goal::of(
            "random bytes, auto: bytes against plain",
            ratio(random_auto.bytes, random_plain.bytes),
            "",
            Bound::AtMost(1.02),
        ),
        Goal::of(
            "first guest, auto: times fewer bytes than plain",
            ratio(plain.bytes, auto.bytes),
            "",
            Bound::AtLeast(2.5),
        ),
        Goal::of(
            "first guest, auto: time against plain",
            auto.seconds / plain.seconds,
            "",
            Bound::AtMost(0.5),
        ),
        Goal::of(
            "second guest: share of its pages that the first one has",
            share,
            &format!("{known} of {filled}"),
            Bound::Stated,
        ),
        Goal::of(
            "second guest: bytes against what this share allows",
            again.bytes as f64 / allowed,
            "",
            Bound::AtMost(1.1),
        ),
        Goal::of(
            "second guest: bytes against the same without the first one",
            ratio(again.bytes, second_alone.bytes),
            "",
            Bound::Stated,
        ),
    ];
    let goals = goal::table(&goals);
    println!("\n{goals}");
    if let Some(file) = &args.markdown {
        let lines: String = rows.iter().map(|row| row.clone() + "\n").collect();
        let text = markdown::document(&Measured::now("compress"), &format!("{goals}\n{HEAD}\n{lines}"));
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

const HEAD: &str = "| stream | --compress | stream, MiB | bytes on the link, MiB | seconds |\n| --- | --- | --- | --- | --- |";
