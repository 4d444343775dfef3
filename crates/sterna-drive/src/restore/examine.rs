//! Examines an image before the VM reads it.

use std::path::Path;

use serde_json::Value;
use sterna_image::tools::finding::{Finding, Severity};
use sterna_image::tools::verify::structure;
use sterna_image::{Access, Form, Format, Image, ImageError, Preview, Shape};
use sterna_qmp::ClientError;
use sterna_wire::vmdesc;

use super::devices::{MachineDevices, processors};
use crate::save::{check_stream, description};
use crate::{DriveError, MachineBlock, Vm, blocks};

/// An examined image that may be restored.
#[derive(Debug, Clone)]
pub struct Subject {
    preview: Preview,
    /// The damage that the examination found.
    damage: Vec<Finding>,
    /// Whether the last byte was checked. The end of a compressed stream is only known after decompression.
    is_whole: bool,
    /// The devices' sections by name and instance. None if the image does not list them, or only in its compressed
    /// part.
    sections: Option<Vec<(String, u32)>>,
}

impl Subject {
    /// Examines the image at `path` without its pages. Reads the rest of a mapped-ram image, the head and the end of
    /// a stream, and only the head of a compressed stream.
    ///
    /// # Errors
    /// [`DriveError::Unreadable`]: the defect, and advice.
    pub fn examine(path: &Path, access: &Access) -> Result<Self, DriveError> {
        let mut preview = Preview::open_with(path, access).map_err(unreadable)?;
        let mut is_whole = true;
        let mut damage = Vec::new();
        let mut sections = None;
        match (preview.format.form(), preview.format.is_compressed()) {
            (Form::Mapped, _) => {
                let image = Image::open_with(path, access).map_err(unreadable)?;
                check_bitmaps(path, &image)?;
                if !has_its_end(&image) {
                    return Err(torn(path));
                }
                damage = structure(&image).map_err(unreadable)?;
                damage.retain(|finding| finding.severity == Severity::Error);
                preview.shape = image.shape().clone();
                sections = preview.shape.description.as_deref().and_then(listed);
            }
            (Form::Legacy, false) => {
                let has_end = check_stream(path, preview.stream_offset).map_err(|error| {
                    DriveError::Unreadable(format!("cannot read {}: {error}", path.display()))
                })?;
                // There may be bytes after the end marker, which only a walk over the whole image finds.
                let text = if has_end {
                    description(path, preview.stream_offset).ok().flatten()
                } else {
                    let image = Image::open(path).map_err(unreadable)?;
                    if !has_its_end(&image) {
                        return Err(torn(path));
                    }
                    image.shape().description.clone()
                };
                sections = text.as_deref().and_then(listed);
            }
            (Form::Legacy, true) => is_whole = false,
        }
        Ok(Self { preview, damage, is_whole, sections })
    }

    /// Format of the image.
    pub fn format(&self) -> Format {
        self.preview.format
    }

    /// Where the VM finds the pages: an image in Sterna's own format goes to it as a stream.
    pub fn form(&self) -> Form {
        if self.preview.format == Format::Sterna { Form::Legacy } else { self.preview.format.form() }
    }

    /// The structure of the image: its head only, or all of a mapped-ram image.
    pub fn shape(&self) -> &Shape {
        &self.preview.shape
    }

    /// Offset of the stream in the file, in bytes.
    pub fn stream_offset(&self) -> u64 {
        self.preview.stream_offset
    }

    /// Whether the last byte was checked.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether the guest ran, according to libvirt's header. None for a bare stream: the VM reads the run state
    /// itself.
    pub fn was_running(&self) -> Option<bool> {
        self.preview.libvirt_header.as_ref().map(|header| header.was_running != 0)
    }

    /// Compares the image with the machine of `vm`. Returns sentences about harmless differences.
    ///
    /// # Errors
    /// [`DriveError::Unfit`]: another machine type, or a RAM block that is missing or has another size.
    pub fn compare(&self, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        self.compare_in(self.form(), vm)
    }

    /// Does the same as [`compare`](Self::compare), for a VM that gets any image as a stream.
    ///
    /// # Errors
    /// The same as [`compare`](Self::compare).
    pub fn compare_as_stream(&self, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        self.compare_in(Form::Legacy, vm)
    }

    fn compare_in(&self, form: Form, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        let shape = &self.preview.shape;
        let (saved, machine) = (&shape.configuration.machine_type, vm.machine_type()?);
        if !machine.is_empty() && *saved != machine {
            return Err(DriveError::Unfit(format!(
                "the image is of a `{saved}`, but {} is a `{machine}`: start it with -machine {saved}",
                vm.at()
            )));
        }
        let device_remarks = self.compare_devices(vm)?;
        let mut remarks: Vec<String> =
            self.damage.iter().map(|finding| format!("the image is damaged: {finding}")).collect();
        remarks.extend(device_remarks);
        let Some(blocks) = vm.blocks()? else { return Ok(remarks) };
        for block in &shape.ram.blocks {
            compare_block(&block.name, block.length_bytes, form, &blocks, vm.at())?;
        }
        // Machines have RAM blocks that are never in a stream, so a missing block may be harmless.
        let missing = blocks.iter().filter(|m| shape.ram.blocks.iter().all(|block| block.name != m.name));
        remarks.extend(
            missing.map(|block| format!("the machine's RAM block `{}` is not in the image", block.name)),
        );
        Ok(remarks)
    }

    /// Compares processors and devices, as far as image and monitor list them. Sterna compares them when it loads.
    fn compare_devices(&self, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        let Some(sections) = self.sections.as_ref().filter(|_| !vm.is_sterna()) else {
            return Ok(Vec::new());
        };
        let saved = processors(sections);
        let there = match vm.try_execute("query-cpus-fast", Value::Null) {
            Ok(list) => list.as_array().map_or(0, Vec::len),
            Err(ClientError::Refused { .. }) => 0,
            Err(error) => return Err(vm.error(error)),
        };
        if saved > 0 && there > 0 && saved != there {
            return Err(DriveError::Unfit(format!(
                "the image is of a machine with {saved} processors, but {} has {there}: start it with -smp {saved}",
                vm.at()
            )));
        }
        let table = match vm.client().human("info qtree") {
            Ok(table) => table,
            Err(ClientError::Refused { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(vm.error(error)),
        };
        let Some(machine) = MachineDevices::parse(&table) else { return Ok(Vec::new()) };
        if let Some(why) = machine.lacks(sections) {
            return Err(DriveError::Unfit(format!(
                "{why}: start {} with the devices of the saved machine, in the same slots",
                vm.at()
            )));
        }
        let more = machine.not_in(sections);
        let remark = || {
            format!(
                "{} has {}, whose state is not in the image: the saved guest has no such device",
                vm.at(),
                more.join(", ")
            )
        };
        Ok((!more.is_empty()).then(remark).into_iter().collect())
    }
}

/// The sections in a device description, by name and instance.
fn listed(text: &[u8]) -> Option<Vec<(String, u32)>> {
    let lengths = vmdesc::section_lengths(text).ok()?;
    Some(lengths.into_iter().map(|section| (section.name, section.instance)).collect())
}

fn compare_block(
    name: &str,
    bytes: u64,
    form: Form,
    machine: &[MachineBlock],
    at: &str,
) -> Result<(), DriveError> {
    let unfit = |text: String| Err(DriveError::Unfit(text));
    let Some(block) = machine.iter().find(|block| block.name == name) else {
        return unfit(format!(
            "the image has a RAM block `{name}`, but {at} has none: {}",
            blocks::advice(name)
        ));
    };
    let can_grow = block.most_bytes > block.used_bytes;
    let fits = match form {
        // Loading a stream resizes the block, loading mapped-ram does not (specs/mapped-ram.md §6.4).
        Form::Legacy if can_grow => bytes <= block.most_bytes,
        Form::Mapped if can_grow => bytes <= block.used_bytes,
        _ => bytes == block.used_bytes,
    };
    if fits {
        return Ok(());
    }
    let advice = if form == Form::Mapped && can_grow {
        "convert the image to the legacy format, in which such a block is resized (`sterna convert`)"
    } else {
        blocks::advice(name)
    };
    unfit(format!(
        "the RAM block `{name}` has {bytes} bytes in the image and {} at {at}: {advice}",
        block.used_bytes
    ))
}

/// Refuses a background snapshot without bitmaps (specs/mapped-ram.md §4.9), because all RAM would be zero.
fn check_bitmaps(path: &Path, image: &Image) -> Result<(), DriveError> {
    if image.lacks_bitmaps() {
        return Err(DriveError::Unreadable(format!(
            "{} is a background snapshot whose page bitmaps QEMU never wrote; it would load as empty memory: `sterna \
             repair` repairs it",
            path.display()
        )));
    }
    Ok(())
}

/// Whether the end of the image is complete. QEMU skips the description unread, so it would load an image that was cut
/// inside it. Such an image is refused here, because the cause of the cut is unknown.
fn has_its_end(image: &Image) -> bool {
    image.shape().has_eof && !image.is_description_torn()
}

fn unreadable(error: ImageError) -> DriveError {
    DriveError::Unreadable(error.to_string())
}

fn torn(path: &Path) -> DriveError {
    DriveError::Unreadable(format!(
        "{} has no end: it is truncated or still being written; `sterna verify` shows the position",
        path.display()
    ))
}
