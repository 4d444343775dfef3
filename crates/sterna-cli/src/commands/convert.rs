//! `sterna convert`: writes an image in another format, compression or container.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;
use sterna_drive::save::newest_libvirt_format_here;
use sterna_image::convert::{
    ConvertOptions, Converted, Input, Output, convert, convert_directory, copy_image, directory_kind,
    write_directory,
};
use sterna_image::{Direct, Form, Format};

use crate::exit::{Done, Status, Stop};
use crate::frames::{self, Frames, Source};
use crate::interrupts::Interrupts;
use crate::storage::Storage;
use crate::{terminal, units};

/// From what, to what.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
Formats: {}.

The source is not changed. It is checked during the conversion. Without --force-damaged a damaged image is refused: nothing of it is \
written to standard output. If the damage is found in a stream from standard input, the output ends without its end mark, so that no \
program loads it. The target is written to a temporary file, synced and renamed: it is complete or absent.", format_names()))]
pub struct Arguments {
    /// Image to read, or a directory with a snapshot of Firecracker or Cloud Hypervisor; `-`: a legacy stream on standard input, compressed or not
    #[arg(value_name = "SOURCE")]
    pub from: PathBuf,
    /// Image to write: a file; or in Sterna's own format store:DIRECTORY#NAME, s3://BUCKET/PREFIX#NAME or s3://BUCKET/KEY.sterna; `-`: a legacy stream without container on standard output
    #[arg(value_name = "TARGET")]
    pub to: PathBuf,
    /// Format of the target [default: sterna if the target ends with .sterna, else mapped-ram; for a source in libvirt's container libvirt-sparse if both the QEMU
    /// and the libvirt on this machine support it, else libvirt-raw]
    #[arg(short, long)]
    pub format: Option<Format>,
    /// Domain XML for a libvirt image, from `virsh dumpxml --migratable --inactive` [default: the XML in the source].
    /// If the source has no container, libvirt restores the guest in the state in which it was saved: a paused guest
    /// stays paused until `virsh resume`
    #[arg(long, value_name = "FILE")]
    pub xml: Option<PathBuf>,
    /// File with the cookie for a libvirt image [default: the cookie in the source, if there is one]
    #[arg(long, value_name = "FILE")]
    pub cookie: Option<PathBuf>,
    /// Replace the target if it exists, and accept an XML of another machine
    #[arg(long)]
    pub force: bool,
    /// Convert the image even if it is damaged (see `sterna verify`). Damaged data is copied unchanged and reported; a
    /// truncated description is left out
    #[arg(long)]
    pub force_damaged: bool,
    /// Number of threads that copy, compress and write [default: one per CPU]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Read and write through the page cache
    #[arg(long)]
    pub no_direct_io: bool,
    /// Alignment of the pages in a mapped-ram image: a multiple of 4k
    #[arg(long, default_value = "1M", value_name = "SIZE", value_parser = units::parse_size)]
    pub alignment: u64,
    /// How an image in Sterna's own format is written.
    #[command(flatten, next_help_heading = "Sterna's own format")]
    pub frames: Frames,
    /// The source is a diff snapshot of Firecracker: holes of its memory file are pages of the base
    #[arg(long, requires = "base")]
    pub diff_snapshot: bool,
    /// How the source is read.
    #[command(flatten)]
    pub source: Source,
    /// How images in object storages are reached.
    #[command(flatten)]
    pub storage: Storage,
    /// Print the result as JSON, on standard error if the target is `-`
    #[arg(long)]
    pub json: bool,
}

/// Converts the image and prints a summary.
pub fn execute(arguments: &Arguments) -> Done {
    let started = Instant::now();
    let options = arguments.options()?;
    Interrupts::remove_files()?;
    if let Some(done) = directory(arguments, &options)? {
        return Ok(done);
    }
    if !is_pipe(&arguments.to) {
        terminal::note_stale(&arguments.to);
    }
    let converted = convert(input(&arguments.from)?, output(&arguments.to), &options)
        .map_err(|error| Stop::of_image(&error, &[&arguments.from]))?;
    let seconds = started.elapsed().as_secs_f64();
    for finding in &converted.damage {
        terminal::note(&format!("sterna: warning: copied unchanged: {finding}"));
    }
    match arguments.json {
        // Standard output carries the converted stream, so JSON goes to standard error.
        true if is_pipe(&arguments.to) => terminal::note(&json(arguments, &converted, seconds)?),
        true => terminal::print(&json(arguments, &converted, seconds)?),
        false => terminal::note(&sentence(arguments, &converted, seconds)),
    }
    Ok(Status::Done)
}

/// Converts from or to a directory of Firecracker or Cloud Hypervisor; none if neither side is one.
fn directory(arguments: &Arguments, options: &ConvertOptions) -> Result<Option<Status>, Stop> {
    let (from, to) = (&arguments.from, &arguments.to);
    let stop = |error| Stop::of_image(&error, &[from]);
    let done = if from.is_dir() {
        if arguments.format.is_some_and(|format| format != Format::Sterna) {
            return Err(Stop::usage("a directory of another VMM is converted to the format sterna only"));
        }
        if is_pipe(to) {
            return Err(no_pipe("a directory of another VMM is converted to the format sterna"));
        }
        convert_directory(from, to, arguments.diff_snapshot, options).map_err(stop)?
    } else {
        let kind = if is_pipe(from) { None } else { directory_kind(from, &options.access).map_err(stop)? };
        if kind.is_none() {
            return Ok(None);
        }
        if is_pipe(to) {
            return Err(no_pipe(
                "an image of another VMM is converted to a directory or to the format sterna",
            ));
        }
        match arguments.format == Some(Format::Sterna) || frames::is_place(to) {
            true => copy_image(from, to, options).map_err(stop)?,
            false => write_directory(from, to, options).map_err(stop)?,
        }
    };
    let (memory, bytes) = (units::bytes(done.ram_bytes), units::bytes(done.bytes));
    terminal::note(&format!("wrote {}: {} of {memory} of memory, {bytes}", to.display(), done.kind));
    Ok(Some(Status::Done))
}

/// The refusal of standard output for what `what` says.
fn no_pipe(what: &str) -> Stop {
    Stop::usage(format!("{what}, which standard output cannot carry: give a path as the target"))
}

impl Arguments {
    fn options(&self) -> Result<ConvertOptions, Stop> {
        Ok(ConvertOptions {
            target: self.target(),
            xml: self.xml.as_deref().map(text).transpose()?,
            cookie: self.cookie.as_deref().map(text).transpose()?,
            replace: self.force,
            direct: if self.no_direct_io { Direct::Off } else { Direct::Wanted },
            threads: self.threads,
            alignment: self.alignment,
            force_damaged: self.force_damaged,
            access: self.source.access()?,
            frames: self.frames.options()?,
        })
    }

    /// None leaves it to the library: mapped-ram.
    fn target(&self) -> Option<Format> {
        if self.format.is_some() {
            return self.format;
        }
        if is_pipe(&self.to) {
            return Some(Format::Legacy);
        }
        if frames::is_place(&self.to) {
            return Some(Format::Sterna);
        }
        if !is_in_libvirts_container(&self.from) {
            return None;
        }
        Some(newest_libvirt_format_here())
    }
}

/// The formats as the help lists them.
fn format_names() -> String {
    let name = |format: &Format| match (format.is_libvirt(), format.form()) {
        (true, Form::Mapped) => format!("{format} ({})", Form::Mapped.name()),
        _ => format.to_string(),
    };
    Format::ALL.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// By its first bytes. What cannot be read is said when it is opened.
fn is_in_libvirts_container(path: &Path) -> bool {
    let mut magic = [0; Format::FIRST_BYTES];
    !is_pipe(path)
        && !is_fifo(path)
        && File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok())
        && Format::of_first_bytes(&magic).is_some_and(Format::is_libvirt)
}

fn is_pipe(path: &Path) -> bool {
    path == Path::new("-")
}

/// A named pipe, or the pipe of a shell's `<(command)`. It can be read only once.
fn is_fifo(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo())
}

fn input(path: &Path) -> Result<Input, Stop> {
    if is_pipe(path) {
        return Ok(Input::Pipe(Box::new(io::stdin())));
    }
    if !is_fifo(path) {
        return Ok(Input::File(path.into()));
    }
    let pipe = File::open(path);
    Ok(Input::Pipe(Box::new(pipe.map_err(|error| Stop::cannot_read(path, &error))?)))
}

fn output(path: &Path) -> Output {
    if is_pipe(path) { Output::Pipe(Box::new(io::stdout())) } else { Output::File(path.into()) }
}

/// Reads a text file for the container, without a trailing NUL.
fn text(path: &Path) -> Result<Vec<u8>, Stop> {
    let mut text = std::fs::read(path).map_err(|error| Stop::cannot_read(path, &error))?;
    if text.last() == Some(&0) {
        text.pop();
    }
    Ok(text)
}

fn sentence(arguments: &Arguments, converted: &Converted, seconds: f64) -> String {
    let Converted { from, to, data_pages, zero_pages, shared_bytes, .. } = converted;
    let mut text = format!(
        "{} ({from}) is now {} ({to}): {} of data, {} of zeros",
        arguments.from.display(),
        arguments.to.display(),
        units::bytes(data_pages * PAGE_BYTES),
        units::bytes(zero_pages * PAGE_BYTES),
    );
    if *shared_bytes > 0 {
        text += &format!(", {} shared with the source", units::bytes(*shared_bytes));
    }
    text + &format!(", in {}", units::seconds(seconds))
}

const PAGE_BYTES: u64 = 4096;

fn json(arguments: &Arguments, converted: &Converted, seconds: f64) -> Result<String, Stop> {
    let value = json!({
        "schema": "sterna-convert",
        "version": 1,
        "source": { "file": arguments.from, "kind": converted.from.name() },
        "target": { "file": arguments.to, "kind": converted.to.name(), "bytes": converted.target_bytes },
        "ram_bytes": converted.ram_bytes,
        "data_bytes": converted.data_pages * PAGE_BYTES,
        "zero_bytes": converted.zero_pages * PAGE_BYTES,
        "shared_bytes": converted.shared_bytes,
        "damage": converted.damage,
        "seconds": seconds,
    });
    serde_json::to_string_pretty(&value).map_err(|error| Stop::failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use sterna_image::ImageError;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn run(line: &[&str]) -> Done {
        let line = ["convert"].iter().chain(line);
        execute(&Line::try_parse_from(line).unwrap().arguments)
    }

    #[test]
    fn convert_to_a_file_that_is_there_is_a_usage_error_and_leaves_it() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&from, b"QEVM").unwrap();
        std::fs::write(&to, b"mine").unwrap();

        let stop = run(&[from.to_str().unwrap(), to.to_str().unwrap()]).unwrap_err();

        assert_eq!(stop.status, Status::Usage);
        assert_eq!(std::fs::read(&to).unwrap(), b"mine");
    }

    #[test]
    fn convert_of_a_background_snapshot_without_bitmaps_names_repair() {
        let error = Stop::of_image(&ImageError::NoBitmaps { file: "a".into() }, &[Path::new("a")]);

        assert_eq!(error.status, Status::Unreadable);
        assert!(error.message.contains("sterna repair"), "{}", error.message);
    }

    #[test]
    fn convert_of_a_file_that_is_no_image_fails_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&from, b"#!/bin/sh\nexit 0\n").unwrap();

        let stop = run(&[from.to_str().unwrap(), to.to_str().unwrap()]).unwrap_err();

        assert_eq!(stop.status, Status::Unreadable);
        assert!(stop.message.contains("not an image of a virtual machine"), "{}", stop.message);
        assert!(!to.exists());
    }

    /// The target `-` is no file with that name.
    #[test]
    fn convert_of_a_directory_to_standard_output_is_a_usage_error() {
        let directory = tempfile::tempdir().unwrap();

        let stop = run(&[directory.path().to_str().unwrap(), "-"]).unwrap_err();

        assert_eq!(stop.status, Status::Usage, "{}", stop.message);
        assert!(stop.message.contains("standard output"), "{}", stop.message);
        assert!(!Path::new("-").exists());
    }

    #[test]
    fn format_that_is_unknown_is_refused_with_all_names() {
        let error = Line::try_parse_from(["convert", "a", "b", "--format", "qcow2"]).err().unwrap();
        assert!(error.to_string().contains("libvirt-sparse"), "{error}");
    }
}
