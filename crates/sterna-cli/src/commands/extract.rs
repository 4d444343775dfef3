//! `sterna extract`: copies a guest's memory from an image to a file.

use std::path::PathBuf;

use sterna_image::tools::architecture::Architecture;
use sterna_image::tools::extract::{ExtractOptions, Extracted, Part, extract};
use sterna_image::{Image, ImageError};

use super::verify::warn_of_damage;
use crate::exit::{Done, Status, Stop};
use crate::frames::Opened;
use crate::interrupts::Interrupts;
use crate::storage::Storage;
use crate::{terminal, units};

/// Which image, what of it, and where it goes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Without --block and --range, all memory is written as an ELF core with the layout of QEMU's dump-guest-memory:
  gdb -c CORE            x/8xg 0x100000 reads physical addresses; with --virtual, virtual ones
  crash vmlinux CORE

The file is written under a temporary name and renamed: it is complete or absent. Zero pages are holes.")]
pub struct Arguments {
    /// Image of a guest: mapped-ram, legacy stream, compressed, or a save image of libvirt
    pub image: PathBuf,
    /// How an image in Sterna's own format is read.
    #[command(flatten)]
    pub opened: Opened,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// File to write
    pub output: PathBuf,
    /// Write one RAM block as raw bytes (`sterna inspect` lists the names)
    #[arg(long, value_name = "NAME", conflicts_with_all = ["range", "elf"])]
    pub block: Option<String>,
    /// Write a range of guest physical addresses as raw bytes, such as 0x100000:64K
    #[arg(long, value_name = "START:LENGTH", conflicts_with = "elf", value_parser = range)]
    pub range: Option<(u64, u64)>,
    /// Write an ELF core of all memory (default)
    #[arg(long)]
    pub elf: bool,
    /// Add the guest's virtual addresses to the core (read from its page tables)
    #[arg(long = "virtual", conflicts_with_all = ["block", "range"])]
    pub is_virtual: bool,
    /// Physical address of a block (such as a DIMM), if the image does not contain it
    #[arg(long = "at", value_name = "BLOCK=ADDRESS", value_parser = placed)]
    pub placed: Vec<(String, u64)>,
    /// Architecture of the machine, if the image does not contain it: x86-64, aarch64, ppc64, ppc64le, s390x, riscv64.
    /// It also determines the addresses of RAM
    #[arg(long, conflicts_with = "block")]
    pub arch: Option<Architecture>,
    /// Write the file even if part of the guest's RAM is missing: blocks with an unknown address (see --at) are left
    /// out, and shared memory that is not in the image is written as zeros
    #[arg(long, conflicts_with = "block")]
    pub partial: bool,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
    /// Number of threads that copy [default: one per CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Extracts the memory and prints a summary.
pub fn execute(arguments: &Arguments) -> Done {
    let stop = |error: ImageError| Stop::of_image(&error, &[&arguments.image]);
    let image = Image::open_with(&arguments.image, &arguments.opened.access()?).map_err(stop)?;
    warn_of_damage(&image)?;
    let part = match (&arguments.block, arguments.range) {
        (Some(name), _) => Part::Block(name.clone()),
        (None, Some((start, length_bytes))) => Part::Range { start, length_bytes },
        (None, None) => Part::Core { is_virtual: arguments.is_virtual },
    };
    let options = ExtractOptions {
        replace: arguments.force,
        placed: arguments.placed.clone(),
        architecture: arguments.arch,
        threads: arguments.threads.map_or(0, usize::from),
        partial: arguments.partial,
    };
    Interrupts::remove_files()?;
    terminal::note_stale(&arguments.output);
    let extracted = extract(&image, &part, &arguments.output, &options).map_err(stop)?;
    if arguments.json {
        let text = serde_json::to_string_pretty(&extracted);
        terminal::print(&text.map_err(|error| Stop::failed(error.to_string()))?);
    } else {
        terminal::note(&sentence(arguments, &extracted));
    }
    Ok(Status::Done)
}

fn sentence(arguments: &Arguments, extracted: &Extracted) -> String {
    let mut text = format!(
        "wrote {}: {}, {} of it data",
        arguments.output.display(),
        units::bytes(extracted.file_bytes),
        units::bytes(extracted.data_bytes)
    );
    if extracted.shared_bytes > 0 {
        text += &format!(" ({} shared with the image)", units::bytes(extracted.shared_bytes));
    }
    if extracted.segments > 0 {
        text +=
            &format!("; {} segments, registers of {} processors", extracted.segments, extracted.processors);
        text += &format!(" ({})", extracted.architecture);
    }
    if extracted.missing_bytes > 0 {
        text += &format!(
            "\nsterna: warning: {} of the guest's RAM are missing",
            units::bytes(extracted.missing_bytes)
        );
    }
    for note in &extracted.notes {
        text += &format!("\nnote: {note}");
    }
    text
}

/// Parses `START:LENGTH`; both are hexadecimal with 0x, or decimal with an optional unit.
fn range(text: &str) -> Result<(u64, u64), String> {
    let Some((start, length)) = text.split_once(':') else {
        return Err(format!("`{text}` is not START:LENGTH, such as 0x100000:64K"));
    };
    Ok((number(start)?, number(length)?))
}

/// Parses `BLOCK=ADDRESS`, split at the last `=` because a block's name may contain one.
fn placed(text: &str) -> Result<(String, u64), String> {
    match text.rsplit_once('=') {
        Some((name, address)) if !name.is_empty() => Ok((name.to_owned(), number(address)?)),
        _ => Err(format!("`{text}` is not BLOCK=ADDRESS, such as dimm0=0x100000000")),
    }
}

fn number(text: &str) -> Result<u64, String> {
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| format!("`{text}` is not a hexadecimal number"));
    }
    match text {
        "0" => Ok(0),
        _ => units::parse_size(text),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn architecture_is_taken_for_cores_and_ranges() {
        let parse = |more: &[&str]| {
            let line = [&["extract", "image", "out", "--arch", "riscv64"], more].concat();
            Line::try_parse_from(line).map(|line| line.arguments.arch)
        };
        for more in [&[][..], &["--range", "0x80000000:64K"]] {
            assert_eq!(parse(more).unwrap(), Some(Architecture::Riscv64), "{more:?}");
        }
        assert!(parse(&["--block", "ram"]).is_err());
    }

    #[test]
    fn range_and_place_read_addresses_and_sizes() {
        assert_eq!(range("0x100000:64K"), Ok((0x10_0000, 64 << 10)));
        assert_eq!(range("0:0x10"), Ok((0, 16)));
        assert_eq!(placed("0000:00:02.0/vm0=0x100000000"), Ok(("0000:00:02.0/vm0".into(), 1 << 32)));
        for bad in ["", "5", "0x1", "0x1:", "x:1K", "0x1:5"] {
            assert!(range(bad).is_err(), "{bad}");
        }
        assert!(placed("=1K").is_err() && placed("a").is_err());
    }
}
