//! `sterna inspect`: shows the contents of an image.

use std::path::PathBuf;

use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::inspect::{FramesPart, Inspection, inspect};
use sterna_image::tools::picture::picture;
use sterna_image::{Image, ImageError};

use super::verify::warn_of_damage;
use crate::exit::{Done, Status, Stop};
use crate::frames::Opened;
use crate::record::write_whole;
use crate::storage::Storage;
use crate::{terminal, units};

/// Which image.
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
    /// Draw a map of the pages that contain data
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

/// Reads the image and prints its contents.
pub fn execute(arguments: &Arguments) -> Done {
    let stop = |error: ImageError| Stop::of_image(&error, &[&arguments.image]);
    let image = Image::open_with(&arguments.image, &arguments.opened.access()?).map_err(stop)?;
    warn_of_damage(&image)?;
    if let Some(file) = arguments.svg.as_ref().filter(|file| image.is_at(file)) {
        return Err(Stop::usage(format!(
            "{} is the image itself; give another file for the drawing",
            file.display()
        )));
    }
    let coverage = Coverage::of(&image).map_err(stop)?;
    let inspection = inspect(&image, &coverage).map_err(stop)?;
    if let Some(file) = &arguments.svg {
        write_whole(file, &picture(&inspection, &coverage))?;
    }
    terminal::print(&if arguments.json {
        serde_json::to_string_pretty(&inspection).map_err(|error| Stop::failed(error.to_string()))?
    } else {
        text(&inspection)
    });
    if let Some(file) = &arguments.svg {
        terminal::note(&format!("wrote {}", file.display()));
    }
    Ok(Status::Done)
}

fn text(it: &Inspection) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        if !value.is_empty() {
            text += &format!("{name:<13} {value}\n");
        }
    };
    let on_disk =
        it.allocated_bytes.map_or(String::new(), |bytes| format!(", {} on disk", units::bytes(bytes)));
    row("image", it.file.clone());
    row("kind", it.kind.clone());
    row("size", format!("{}{on_disk}", units::bytes(it.file_bytes)));
    if let Some(libvirt) = &it.libvirt {
        let domain = libvirt.domain.clone().unwrap_or_else(|| "?".into());
        let then = if libvirt.was_running { "runs after a restore" } else { "stays paused after a restore" };
        row("libvirt", format!("domain {domain}, {then}; stream at byte {}", it.stream_offset));
    }
    row("machine", it.machine_type.clone());
    row("capabilities", it.capabilities.join(", "));
    row("uuid", it.uuid.clone().unwrap_or_default());
    row("guest was", it.run_state.clone().unwrap_or_default());
    row("processors", if it.processors > 0 { it.processors.to_string() } else { String::new() });
    let data: u64 = it.blocks.iter().map(|block| block.data_pages).sum();
    row(
        "RAM",
        format!("{}, {} with data", units::bytes(it.ram_bytes), units::bytes(data * units::PAGE_BYTES)),
    );
    if let Some(frames) = &it.frames {
        row("frames", frames_text(frames));
        row("digest", frames.digest.clone());
        row("base", frames.base.clone().unwrap_or_default());
        let touched = units::bytes(frames.working_set_bytes);
        let ranges = frames.working_set_ranges;
        row("working set", if ranges > 0 { format!("{touched} in {ranges} ranges") } else { String::new() });
    }
    text += "\n";
    text += &blocks(it);
    text += "\n";
    text += &devices(it);
    if !it.is_told_apart {
        text += "Some devices could not be identified and are missing in this list. `sterna verify` shows their \
                 positions.\n";
    }
    let description = match it.description_bytes {
        Some(bytes) => format!("a description of {}", units::bytes(bytes)),
        None => "no description".into(),
    };
    let end = match (it.has_eof, it.has_end) {
        (false, _) if it.is_end_unsure => {
            "The stream has neither footers nor a description: it is unknown whether it is complete."
                .to_owned()
        }
        (false, _) => "The stream is truncated: see `sterna verify`.".to_owned(),
        (true, true) => format!("The stream is complete, with {description}."),
        (true, false) => {
            format!("The stream is complete, with {description}; RAM has no END (background snapshot).")
        }
    };
    text += &format!("\n{end}\n");
    if it.trailing_bytes > 0 {
        text += &format!("{} bytes after the stream are ignored.\n", it.trailing_bytes);
    }
    if it.was_streamed {
        text += "A legacy stream has no index, so all of it was read.\n";
    }
    text
}

fn frames_text(frames: &FramesPart) -> String {
    let layers = if frames.layers > 1 { format!(", {} layers", frames.layers) } else { String::new() };
    let encrypted = if frames.is_encrypted { ", encrypted" } else { "" };
    format!(
        "{}, {}; extents of {}{layers}{encrypted}",
        units::count(frames.frames.into()),
        units::bytes(frames.frame_bytes),
        units::bytes(frames.extent_bytes.into())
    )
}

fn blocks(it: &Inspection) -> String {
    let mut rows =
        vec![["block".into(), "size".into(), "data pages".into(), "zero pages".into(), "absent".into()]];
    for block in &it.blocks {
        let absent = match block.absent_pages {
            0 => String::new(),
            _ if block.is_skipped => "shared memory".into(),
            pages => units::count(pages),
        };
        rows.push([
            block.name.clone(),
            units::bytes(block.length_bytes),
            units::count(block.data_pages),
            units::count(block.zero_pages),
            absent,
        ]);
    }
    columns(&rows)
}

fn devices(it: &Inspection) -> String {
    let head = ["device".into(), "instance".into(), "version".into(), "bytes".into(), String::new()];
    let mut rows = vec![head];
    for device in &it.devices {
        let remark = match (device.is_live, device.is_early, device.is_described) {
            (true, ..) => "next to RAM",
            (_, true, _) => "before RAM",
            (.., true) => "",
            (.., false) => "not described",
        };
        rows.push([
            device.name.clone(),
            device.instance.to_string(),
            device.version.to_string(),
            units::count(device.bytes),
            remark.into(),
        ]);
    }
    columns(&rows)
}

/// Aligns a table: the first and the last column to the left, numbers between them to the right.
fn columns(rows: &[[String; 5]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = format!("{:<1$}", row[0], widths[0]);
        for column in 1..4 {
            line += &format!("  {:>1$}", row[column], widths[column]);
        }
        line += &format!("  {}", row[4]);
        text += line.trim_end();
        text += "\n";
    }
    text
}
