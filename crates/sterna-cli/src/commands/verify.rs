//! `sterna verify`: checks whether an image is sound, and shows where it is damaged.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;
use sterna_image::tools::finding::Severity;
use sterna_image::tools::verify::{Verdict, VerifyOptions, structure, verify_with};
use sterna_image::{Image, ImageError};

use crate::exit::{Done, Status, Stop};
use crate::frames::Opened;
use crate::storage::Storage;
use crate::{terminal, units};

/// Which image, and how to look.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Image of a guest: mapped-ram, legacy stream, compressed, or a save image of libvirt
    pub image: PathBuf,
    /// How an image in Sterna's own format is read.
    #[command(flatten)]
    pub opened: Opened,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Number of threads that read [default: two per CPU, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Print a digest of the guest's RAM: equal RAM has an equal digest in every format
    #[arg(long)]
    pub digest: bool,
    /// Print notes as well as warnings and errors
    #[arg(short, long)]
    pub verbose: bool,
}

/// Checks the image and prints the findings.
pub fn execute(arguments: &Arguments) -> Done {
    let mut options = VerifyOptions { digest: arguments.digest, ..VerifyOptions::default() };
    if let Some(threads) = arguments.threads {
        options.threads = usize::from(threads);
    }
    let begin = Instant::now();
    let verdict = verify_with(&arguments.image, &options, &arguments.opened.access()?).map_err(stop)?;
    let seconds = begin.elapsed().as_secs_f64();
    terminal::print(&if arguments.json {
        json(&verdict, seconds)?
    } else {
        text(&verdict, seconds, arguments.verbose)
    });
    Ok(if verdict.is_sound() { Status::Done } else { Status::Failed })
}

/// The error for an image that cannot be checked. The status is never 1, which would mean that the image is
/// damaged.
pub fn stop(error: ImageError) -> Stop {
    Stop::unreadable(error.to_string())
}

/// Warns of damage in an image that another command reads.
/// Finds only damage that shows without reading all of the image.
pub fn warn_of_damage(image: &Image) -> Result<(), Stop> {
    let findings = structure(image).map_err(stop)?;
    for finding in findings.iter().filter(|finding| finding.severity == Severity::Error) {
        terminal::note(&format!("sterna: warning: {} is damaged: {finding}", image.path_name()));
    }
    Ok(())
}

fn json(verdict: &Verdict, seconds: f64) -> Result<String, Stop> {
    let value = json!({
        "schema": "sterna-verify",
        "version": 1,
        "sound": verdict.is_sound(),
        "seconds": seconds,
        "verdict": verdict,
    });
    serde_json::to_string_pretty(&value).map_err(|error| Stop::failed(error.to_string()))
}

fn text(verdict: &Verdict, seconds: f64, verbose: bool) -> String {
    let mut text = String::new();
    let least = if verbose { Severity::Note } else { Severity::Warning };
    for finding in verdict.findings.iter().filter(|finding| finding.severity >= least) {
        let word = match finding.severity {
            Severity::Error => terminal::verdict(false, "error"),
            Severity::Warning => "warning".to_owned(),
            Severity::Note => "note".to_owned(),
        };
        text += &format!("{word} [{}] {finding}\n", finding.code);
    }
    let sound = verdict.is_sound();
    let word = terminal::verdict(sound, if sound { "sound" } else { "damaged" });
    text += &format!(
        "{}: {word}: {}{}; {} of RAM, {} pages with data; read {} in {}",
        verdict.file,
        verdict.kind,
        if verdict.machine_type.is_empty() {
            String::new()
        } else {
            format!(" of a {}", verdict.machine_type)
        },
        units::bytes(verdict.ram_bytes),
        units::count(verdict.data_pages),
        units::bytes(verdict.read_bytes),
        units::seconds(seconds),
    );
    let (warnings, notes) = (verdict.count(Severity::Warning), verdict.count(Severity::Note));
    if warnings + notes > 0 {
        text += &format!("; {warnings} warnings, {notes} notes");
    }
    if let Some(digest) = &verdict.digest {
        text += &format!("\nRAM digest {digest}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(image: PathBuf) -> Arguments {
        Arguments {
            image,
            opened: Opened::default(),
            storage: Storage::default(),
            json: true,
            threads: Some(1),
            digest: false,
            verbose: false,
        }
    }

    #[test]
    fn verify_of_damage_fails_and_of_what_is_no_image_cannot_tell() {
        let directory = tempfile::tempdir().unwrap();
        let (empty, other) = (directory.path().join("empty"), directory.path().join("other"));
        std::fs::write(&empty, "").unwrap();
        std::fs::write(&other, "no image at all").unwrap();

        assert_eq!(execute(&arguments(empty)), Ok(Status::Failed));
        assert_eq!(execute(&arguments(other)).unwrap_err().status, Status::Unreadable);
        assert_eq!(
            execute(&arguments(directory.path().join("absent"))).unwrap_err().status,
            Status::Unreadable
        );
        assert_eq!(execute(&arguments(directory.path().into())).unwrap_err().status, Status::Unreadable);
    }
}
