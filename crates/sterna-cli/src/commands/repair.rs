//! `sterna repair`: adds the page bitmaps that QEMU does not write into a background snapshot.

use std::path::PathBuf;

use sterna_image::ImageError;
use sterna_image::tools::repair::{RepairTo, repair_with};
use sterna_image::tools::verify::VerifyOptions;

use crate::exit::{Done, Status, Stop};
use crate::frames::Opened;
use crate::interrupts::Interrupts;
use crate::{terminal, units};

/// Which image, and where the repaired one goes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
QEMU 11.1 reports a background snapshot with mapped-ram as completed but never writes the image's bitmaps, so no \
program can load it. The file contains all pages, and this command writes the bitmaps. It repairs no other damage: in \
any other image, new bitmaps could restore stale pages.")]
#[command(group(clap::ArgGroup::new("to").required(true).args(["output", "in_place"])))]
pub struct Arguments {
    /// Image to repair
    pub image: PathBuf,
    /// How an image in Sterna's own format is read.
    #[command(flatten)]
    pub opened: Opened,
    /// Write the repaired image to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the bitmaps into the image itself
    #[arg(long)]
    pub in_place: bool,
    /// Replace the output if it exists
    #[arg(long, requires = "output")]
    pub force: bool,
}

/// Repairs the image, in place or into another file.
pub fn execute(arguments: &Arguments) -> Done {
    let to = match &arguments.output {
        Some(path) => RepairTo::File { path: path.clone(), replace: arguments.force },
        None => RepairTo::Itself,
    };
    if let Some(output) = &arguments.output {
        Interrupts::remove_files()?;
        terminal::note_stale(output);
    }
    let done = repair_with(&arguments.image, &to, &VerifyOptions::default(), &arguments.opened.access()?);
    let repaired = done.map_err(|error| match error {
        // The image is not of the kind that can be repaired.
        ImageError::Request(why) => Stop::unreadable(why),
        error => Stop::of_image(&error, &[&arguments.image]),
    })?;
    let path = arguments.output.as_ref().unwrap_or(&arguments.image);
    terminal::note(&format!(
        "wrote {}: {} bitmaps, {} pages; `sterna verify` checks it",
        path.display(),
        repaired.bitmaps,
        units::count(repaired.pages)
    ));
    Ok(Status::Done)
}
