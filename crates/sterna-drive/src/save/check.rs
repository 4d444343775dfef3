//! Checks that the file that the VM wrote is an image.
//!
//! A mapped-ram image is opened as any reader opens it: every offset and bitmap is checked, and the tail is decoded to
//! its end. Of a legacy stream only both ends are checked, because all pages would have to be read again.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use sterna_image::{Form, Image};

use super::run_state;
use crate::{DriveError, MachineBlock};

/// `QEVM`, version 3 (specs/mapped-ram.md §1.1).
const MAGIC: [u8; 8] = [0x51, 0x45, 0x56, 0x4d, 0, 0, 0, 3];
/// How much of the end is read. Descriptions of devices have some 100 KiB.
const TAIL_BYTES: u64 = 16 << 20;

/// Checks the file at `path`, whose stream starts at `offset`, against the machine that wrote it. Returns the offset
/// of the run state in the file, if it was found.
pub(super) fn written(
    path: &Path,
    form: Form,
    offset: u64,
    blocks: Option<&[MachineBlock]>,
) -> Result<Option<u64>, DriveError> {
    match form {
        Form::Mapped => mapped(path, blocks),
        Form::Legacy => legacy(path, offset).map_err(|error| DriveError::file("check", path, error))?,
    }
    .map_err(|what| DriveError::Failed(format!("the VM reports that it saved the guest, but {what}")))
}

fn mapped(path: &Path, blocks: Option<&[MachineBlock]>) -> Result<Option<u64>, String> {
    let image = Image::open(path).map_err(|error| error.to_string())?;
    let shape = image.shape();
    if !shape.has_eof {
        return Err("its image ends inside the devices".into());
    }
    if image.format().form() != Form::Mapped {
        return Err("its image is not mapped-ram".into());
    }
    for block in &shape.ram.blocks {
        let Some(machine) = blocks else { break };
        let fits = machine.iter().any(|m| m.name == block.name && m.used_bytes == block.length_bytes);
        if !fits {
            return Err(format!("the machine has no RAM block `{}`, which its image has", block.name));
        }
    }
    let description = shape.description.as_ref().map_or(0, |text| text.len() as u64 + 5);
    let behind = description + 1 + shape.devices.len() as u64;
    let devices = image.stream_end().checked_sub(behind);
    Ok(devices.zip(run_state::find(&shape.devices)).map(|(devices, place)| devices + place.start as u64))
}

fn legacy(path: &Path, offset: u64) -> io::Result<Result<Option<u64>, String>> {
    let (tail, at) = match ends(path, offset)? {
        Ok(tail) => tail,
        Err(what) => return Ok(Err(what)),
    };
    Ok(Ok(run_state::find(&tail).map(|place| at + place.start as u64)))
}

/// Whether a plain stream, from `offset` to the end of the file, has two valid ends.
pub(crate) fn stream(path: &Path, offset: u64) -> io::Result<bool> {
    Ok(ends(path, offset)?.is_ok())
}

/// The description after a plain stream from `offset` to the end of the file. None if it has none.
pub(crate) fn description(path: &Path, offset: u64) -> io::Result<Option<Vec<u8>>> {
    let Ok((tail, _)) = ends(path, offset)? else { return Ok(None) };
    Ok(description_of(&tail).map(|at| tail[at..].to_vec()))
}

/// The last bytes of a stream whose two ends are valid, and their offset in the file. Else the defect.
fn ends(path: &Path, offset: u64) -> io::Result<Result<(Vec<u8>, u64), String>> {
    // `NONBLOCK`, because opening a FIFO would block. By now another file may be at this path.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let length = file.metadata()?.len();
    let Some(stream_bytes) = length.checked_sub(offset).filter(|bytes| *bytes >= 64) else {
        return Ok(Err("its image is empty".into()));
    };
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, offset)?;
    if magic != MAGIC {
        return Ok(Err("its image does not begin with a stream's header".into()));
    }
    let tail_bytes = stream_bytes.min(TAIL_BYTES);
    let mut tail = vec![0; tail_bytes as usize];
    file.read_exact_at(&mut tail, length - tail_bytes)?;
    if !is_whole_tail(&tail) {
        return Ok(Err("its image has no end".into()));
    }
    Ok(Ok((tail, length - tail_bytes)))
}

/// Whether `tail` ends a stream: EOF, or EOF and the devices' description, whose length field must reach exactly to
/// the end (specs/mapped-ram.md §1.6).
pub(super) fn is_whole_tail(tail: &[u8]) -> bool {
    let described = description_of(tail).is_some();
    // Without a description (`suppress-vmdesc`) the stream ends with the last footer and EOF.
    described || matches!(tail, [.., 0x7e, _, _, _, _, 0])
}

/// Offset of the description whose length field reaches exactly to the end of `tail`.
fn description_of(tail: &[u8]) -> Option<usize> {
    let is_head = |at: &usize| {
        let at = *at;
        tail[at] == 0 && tail[at + 1] == 6 && tail[at + 6] == b'{' && {
            let length = u32::from_be_bytes([tail[at + 2], tail[at + 3], tail[at + 4], tail[at + 5]]);
            at as u64 + 6 + u64::from(length) == tail.len() as u64
        }
    };
    (0..tail.len().saturating_sub(6)).rev().find(is_head).map(|at| at + 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_with_a_description_up_to_the_end_is_whole() {
        let mut tail = vec![9, 9, 0x7e, 0, 0, 0, 1, 0, 6, 0, 0, 0, 4];
        tail.extend_from_slice(b"{12}");

        assert!(is_whole_tail(&tail));
        assert!(is_whole_tail(&tail[..8]));
        for end in (0..tail.len()).filter(|end| *end != 8) {
            assert!(!is_whole_tail(&tail[..end]), "cut at {end}");
        }
    }
}
