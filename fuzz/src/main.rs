//! `sterna-fuzz`: runs the fuzz targets without libFuzzer, as the tests do; see fuzz/README.md.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use sterna_fuzz::check::{self, Options};
use sterna_fuzz::corpus;
use sterna_fuzz::targets::{self, TARGETS, Target};

const USAGE: &str = "\
usage: sterna-fuzz COMMAND

  check [TARGET…] [OPTIONS]   run the stored inputs and a fixed number of mutated ones of each target (or those named)
    --seed S                  draw mutated inputs from S (default 1)
    --count N                 so many mutated inputs for each target
    --seeds DIR               more inputs to begin with, in DIR/TARGET
    --artifacts DIR           write inputs that fail to DIR/TARGET (default fuzz/artifacts)
    --limit SECONDS           an input that takes longer fails (default 60)
  replay TARGET FILE…         run single inputs
  pack TARGET DIR             make the files of DIR the stored inputs of a target
  unpack TARGET DIR           write the stored inputs of a target, and those of its mended bugs, to DIR
  list                        name the targets, each with the length of its longest input";

/// Seed of the tests' inputs. Another seed gives another sample of the same quality.
const SEED: u64 = 1;
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match command(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("sterna-fuzz: {why}");
            ExitCode::FAILURE
        }
    }
}

fn command(arguments: &[String]) -> Result<(), String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match &words[..] {
        ["check", rest @ ..] => check_all(rest),
        ["child", rest @ ..] => {
            let (targets, options) = parse(rest)?;
            targets.iter().try_for_each(|target| check::child(target, &options).map_err(|e| e.to_string()))
        }
        ["replay", target, files @ ..] => {
            let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
            check::replay(find(target)?, &files).map_err(|error| error.to_string())
        }
        ["pack", target, directory] => pack(find(target)?, Path::new(directory)),
        ["unpack", target, directory] => unpack(find(target)?, Path::new(directory)),
        ["list"] => {
            TARGETS.iter().for_each(|target| println!("{} {}", target.name, target.longest));
            Ok(())
        }
        _ => Err(format!("no such command\n\n{USAGE}")),
    }
}

fn find(name: &str) -> Result<&'static Target, String> {
    targets::find(name).ok_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        format!("there is no fuzz target `{name}`; there are {}", names.join(", "))
    })
}

fn parse(words: &[&str]) -> Result<(Vec<&'static Target>, Options), String> {
    let mut options = Options {
        seed: SEED,
        count: None,
        seeds: None,
        artifacts: corpus::directory().join("artifacts"),
        limit: LIMIT,
    };
    let mut targets = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        if !word.starts_with('-') {
            targets.push(find(word)?);
            continue;
        }
        let value = rest.next().ok_or_else(|| format!("`{word}` needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{word}: `{value}` is no number"));
        match *word {
            "--seed" => options.seed = number()?,
            "--count" => options.count = Some(number()?),
            "--limit" => options.limit = Duration::from_secs(number()?),
            "--seeds" => options.seeds = Some(value.into()),
            "--artifacts" => options.artifacts = value.into(),
            _ => return Err(format!("no option is called `{word}`\n\n{USAGE}")),
        }
    }
    if targets.is_empty() {
        targets = TARGETS.iter().collect();
    }
    Ok((targets, options))
}

/// Command line of a child that runs one target with these options.
fn child_of(target: &Target, options: &Options) -> Vec<OsString> {
    let Options { seed, count, seeds, artifacts, limit } = options;
    let mut line: Vec<OsString> = vec!["child".into(), target.name.into()];
    let mut option = |name: &str, value: OsString| line.extend([name.into(), value]);
    option("--seed", seed.to_string().into());
    option("--limit", limit.as_secs().to_string().into());
    option("--artifacts", artifacts.into());
    if let Some(count) = count {
        option("--count", count.to_string().into());
    }
    if let Some(seeds) = seeds {
        option("--seeds", seeds.into());
    }
    line
}

fn check_all(words: &[&str]) -> Result<(), String> {
    let (targets, options) = parse(words)?;
    let mut found = Vec::new();
    for target in &targets {
        let began = Instant::now();
        match check::run(target, &options, &child_of(target, &options)) {
            Ok(passed) => println!(
                "fuzz {}: ok. {} stored inputs, {} of seed {} in {:.1} s",
                target.name,
                passed.stored,
                passed.mutated,
                options.seed,
                began.elapsed().as_secs_f64()
            ),
            Err(why) => found.push(why),
        }
    }
    if found.is_empty() { Ok(()) } else { Err(found.join("\n")) }
}

fn pack(target: &Target, directory: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", target.name);
    let mut inputs = corpus::read(directory).map_err(failed)?;
    inputs.retain(|input| input.len() <= target.longest);
    let count = inputs.len();
    let (packed, left_out) = corpus::pack(inputs, corpus::MOST_STORED_BYTES).map_err(failed)?;
    let file = corpus::stored_file(target.name);
    fs::create_dir_all(corpus::directory().join("stored")).map_err(failed)?;
    fs::write(&file, &packed).map_err(failed)?;
    print!("{}: {} inputs in {} bytes", target.name, count - left_out, packed.len());
    println!("{}", if left_out > 0 { format!(", the {left_out} longest left out") } else { String::new() });
    Ok(())
}

fn unpack(target: &Target, directory: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", target.name);
    fs::create_dir_all(directory).map_err(failed)?;
    for (number, input) in corpus::all(target.name, None).map_err(failed)?.iter().enumerate() {
        fs::write(directory.join(format!("stored-{number:05}")), input).map_err(failed)?;
    }
    Ok(())
}
