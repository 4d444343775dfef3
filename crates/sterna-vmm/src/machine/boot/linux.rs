//! Loads a Linux kernel (a bzImage or a vmlinux) by its 64-bit boot protocol. Both kinds start in long mode
//! with a page of parameters, so one code path serves both. PVH would be a second path without a benefit.
//!
//! | address | content |
//! | --- | --- |
//! | [`BOOT_PARAMETERS`] | the parameters, a page |
//! | [`COMMAND_LINE`] | the command line, with a NUL |
//! | [`acpi::TABLES`] | ACPI's tables |
//! | [`RESET_VECTOR`] | the code to which a kernel jumps in real mode to reset a machine without EFI |
//! | 1 MiB .. | the kernel, at the address that its header or segments request |
//! | end of low RAM | the initrd |

use std::fs::File;
use std::path::Path;

use kvm_bindings::kvm_regs;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult};
use sterna_ram::GuestRam;
use vm_memory::{ByteValued, GuestAddress};

use super::PAGE;
use super::long_mode::{self, CodeSelector};
use crate::config::LinuxImage;
use crate::error::VmmError;
use crate::hardware::memory::DeviceMemory;
use crate::hardware::{Hardware, acpi};
use crate::layout::{
    BOOT_PARAMETERS, COMMAND_LINE, COMMAND_LINE_MAX, KEYBOARD_PORT, KEYBOARD_RESET, LOW_RAM_END,
    RESET_VECTOR, Range,
};
use crate::vcpus::Vcpus;

/// Selector of the code segment that Linux expects.
const CODE: CodeSelector = CodeSelector(0x10);
const HIMEM: u64 = 1 << 20;
const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
/// `setup_header::boot_flag` and `header`, for a vmlinux, which contains none.
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
/// Boot loader type of a loader without an assigned number.
const UNKNOWN_LOADER: u8 = 0xff;
/// `setup_header::xloadflags`: the kernel has an entry for long mode, 0x200 bytes after its start.
const HAS_64_BIT_ENTRY: u16 = 1;
const ENTRY_64_BIT: u64 = 0x200;
/// Highest end of an initrd, unless the header names another one.
const INITRD_MAX: u64 = 0x7fff_ffff;
/// Types of memory in the e820 map.
const RAM: u32 = 1;
const ACPI: u32 = 3;

/// `mov al, KEYBOARD_RESET; out KEYBOARD_PORT, al; hlt; jmp` to itself. Linux resets a hardware-reduced
/// machine through EFI. Without EFI it then tries the firmware's entry.
const RESET_CODE: [u8; 7] = [0xb0, KEYBOARD_RESET, 0xe6, KEYBOARD_PORT as u8, 0xf4, 0xeb, 0xfd];

/// Loads the kernel with its tables and starts vCPU 0 at its entry. The other vCPUs wait until the guest
/// starts them.
pub(super) fn load(hardware: &Hardware, vcpus: &Vcpus, image: &LinuxImage) -> Result<(), VmmError> {
    let (ram, ranges) = (hardware.vm.ram(), hardware.vm.ranges());
    let kernel = Kernel::load(&image.kernel, hardware.vm.memory(), ranges)?;
    let mut header = kernel.header;
    write_command_line(ram, &image.command_line, &header)?;
    header.cmd_line_ptr = COMMAND_LINE as u32;
    header.type_of_loader = UNKNOWN_LOADER;
    if let Some(initrd) = &image.initrd {
        let (start, length) = write_initrd(ram, initrd, &kernel, ranges[0].len_bytes)?;
        (header.ramdisk_image, header.ramdisk_size) = (start, length);
    }
    ram.block(0).write(RESET_VECTOR, &RESET_CODE)?;
    let root = acpi::write(ram, vcpus.count(), hardware.virtio.all().len())?;
    let mut parameters = boot_params { hdr: header, acpi_rsdp_addr: root, ..Default::default() };
    let map = memory_map(ranges);
    parameters.e820_entries = map.len() as u8;
    parameters.e820_table[..map.len()].copy_from_slice(&map);
    ram.block(0).write(BOOT_PARAMETERS, parameters.as_slice())?;
    long_mode::write_tables(hardware, CODE)?;
    let regs = kvm_regs { rip: kernel.entry, rsi: BOOT_PARAMETERS, ..Default::default() };
    long_mode::start(vcpus, 0, CODE, regs)
}

/// A kernel that was loaded into RAM.
struct Kernel {
    header: setup_header,
    entry: u64,
    /// End of the memory that the kernel uses before it reads the memory map.
    end: u64,
}

impl Kernel {
    fn load(path: &Path, memory: &DeviceMemory, ranges: &[Range]) -> Result<Self, VmmError> {
        let refused = |why: String| refuse("kernel", path, why);
        let mut file = File::open(path).map_err(|error| refused(error.to_string()))?;
        let is_elf = is_elf(path).map_err(|error| refused(error.to_string()))?;
        let himem = Some(GuestAddress(HIMEM));
        let loaded = match is_elf {
            true => Elf::load(memory, None, &mut file, himem),
            false => BzImage::load(memory, None, &mut file, himem),
        };
        let loaded = loaded.map_err(|error| {
            refused(format!(
                "it is not a bzImage or vmlinux that fits into {} bytes of RAM: {error}",
                ranges[0].len_bytes
            ))
        })?;
        let kernel = match loaded.setup_header {
            Some(header) if header.xloadflags & HAS_64_BIT_ENTRY == 0 => {
                return Err(refused("it has no 64-bit entry: use a kernel for x86-64".to_owned()));
            }
            Some(header) => Self::of_image(header, &loaded),
            None => Self::of_segments(&loaded),
        };
        if kernel.end > ranges[0].len_bytes {
            let (needed, has) = (kernel.end, ranges[0].len_bytes);
            return Err(refused(format!(
                "it needs RAM up to {needed:#x}, but RAM below the PCI hole ends at {has:#x}"
            )));
        }
        Ok(kernel)
    }

    fn of_image(header: setup_header, loaded: &KernelLoaderResult) -> Self {
        // The kernel unpacks itself to its preferred address and needs `init_size` bytes there.
        let unpacked = header.pref_address.max(loaded.kernel_load.0) + u64::from(header.init_size);
        Self { header, entry: loaded.kernel_load.0 + ENTRY_64_BIT, end: loaded.kernel_end.max(unpacked) }
    }

    fn of_segments(loaded: &KernelLoaderResult) -> Self {
        let header = setup_header {
            boot_flag: BOOT_FLAG,
            header: HEADER_MAGIC,
            kernel_alignment: 16 << 20,
            ..Default::default()
        };
        Self { header, entry: loaded.kernel_load.0, end: loaded.kernel_end }
    }
}

fn is_elf(path: &Path) -> std::io::Result<bool> {
    let mut magic = [0; 4];
    std::io::Read::read_exact(&mut File::open(path)?, &mut magic)?;
    Ok(magic == ELF_MAGIC)
}

fn write_command_line(ram: &GuestRam, line: &str, header: &setup_header) -> Result<(), VmmError> {
    let most = match header.cmdline_size {
        0 => COMMAND_LINE_MAX,
        size => COMMAND_LINE_MAX.min(size as usize),
    };
    let refuse = |why| VmmError::Config { what: "append", why };
    if line.len() > most {
        return Err(refuse(format!("{} bytes, but the kernel accepts at most {most}", line.len())));
    }
    if line.contains('\0') {
        return Err(refuse("it contains a NUL byte".to_owned()));
    }
    let mut bytes = line.as_bytes().to_vec();
    bytes.push(0);
    Ok(ram.block(0).write(COMMAND_LINE, &bytes)?)
}

/// Writes the initrd at the end of low RAM. Returns its address and length.
fn write_initrd(
    ram: &GuestRam,
    path: &Path,
    kernel: &Kernel,
    low_bytes: u64,
) -> Result<(u32, u32), VmmError> {
    let refused = |why: String| refuse("initrd", path, why);
    let bytes = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
    let most = match kernel.header.initrd_addr_max {
        0 => INITRD_MAX,
        most => u64::from(most),
    };
    let end = low_bytes.min(most + 1);
    let start = end.checked_sub(bytes.len() as u64).map(|start| start / PAGE * PAGE);
    match start.filter(|start| *start >= kernel.end) {
        Some(start) if !bytes.is_empty() => {
            ram.block(0).write(start, &bytes)?;
            Ok((start as u32, bytes.len() as u32))
        }
        Some(_) => Err(refused("it is empty".to_owned())),
        None => Err(refused(format!(
            "{} bytes do not fit between the kernel's end at {:#x} and {end:#x}: give the machine more RAM",
            bytes.len(),
            kernel.end
        ))),
    }
}

/// The memory map that a PC's firmware reports. It has RAM without the hole of the first MiB, and ACPI's
/// tables.
fn memory_map(ranges: &[Range]) -> Vec<boot_e820_entry> {
    let entry = |addr, end, kind| boot_e820_entry { addr, size: end - addr, r#type: kind };
    let mut map = vec![entry(0, LOW_RAM_END, RAM), entry(acpi::TABLES, HIMEM, ACPI)];
    map.push(entry(HIMEM, ranges[0].len_bytes, RAM));
    map.extend(ranges[1..].iter().map(|range| entry(range.start, range.start + range.len_bytes, RAM)));
    map
}

fn refuse(what: &'static str, path: &Path, why: String) -> VmmError {
    VmmError::Config { what, why: format!("{}: {why}", path.display()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use sterna_ram::{Backing, RamBlock};

    use super::*;
    use crate::hardware::memory;

    const MIB: u64 = 1 << 20;

    /// A bzImage with the code `payload`. `change` modifies its header.
    fn image(payload: &[u8], change: impl FnOnce(&mut setup_header)) -> tempfile::NamedTempFile {
        let mut header = setup_header {
            setup_sects: 1,
            boot_flag: BOOT_FLAG,
            header: HEADER_MAGIC,
            version: 0x20f,
            loadflags: 1,
            code32_start: HIMEM as u32,
            initrd_addr_max: 0x7fff_ffff,
            xloadflags: HAS_64_BIT_ENTRY,
            cmdline_size: 2047,
            pref_address: 16 * MIB,
            init_size: 8 << 20,
            ..Default::default()
        };
        change(&mut header);
        let mut bytes = vec![0; 0x1f1];
        bytes.extend_from_slice(header.as_slice());
        bytes.resize(1024, 0);
        bytes.extend_from_slice(payload);
        file(&bytes)
    }

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// RAM and its view. Tests declare the variables in this order, so that the view is dropped first.
    fn machine(low_mib: u64) -> (GuestRam, Vec<Range>, DeviceMemory) {
        let ram = GuestRam::new(vec![RamBlock::new("low", low_mib * MIB, Backing::Memfd).unwrap()]).unwrap();
        let ranges = vec![Range { block: 0, start: 0, len_bytes: low_mib * MIB }];
        // SAFETY: variables are dropped in the reverse order of their declaration.
        let memory = unsafe { memory::view(&ram, &ranges) }.unwrap();
        (ram, ranges, memory)
    }

    fn refusal(loaded: Result<Kernel, VmmError>) -> String {
        loaded.map(|kernel| kernel.entry).unwrap_err().to_string()
    }

    #[test]
    fn image_is_where_its_header_wants_it_and_enters_in_long_mode() {
        let (ram, ranges, memory) = machine(64);
        let kernel = Kernel::load(image(&[7; 3000], |_| ()).path(), &memory, &ranges).unwrap();

        assert_eq!((kernel.entry, kernel.end), (HIMEM + 0x200, 24 * MIB));
        let mut bytes = [0; 3001];
        ram.block(0).read(HIMEM, &mut bytes).unwrap();
        assert!(bytes[..3000] == [7; 3000] && bytes[3000] == 0);
    }

    #[test]
    fn file_that_is_no_kernel_or_does_not_fit_is_refused_with_its_name() {
        let (_ram, ranges, memory) = machine(64);
        let text = file(b"a text\n".repeat(200).as_slice());
        let why = refusal(Kernel::load(text.path(), &memory, &ranges));
        assert!(
            why.contains("not a bzImage or vmlinux") && why.contains(text.path().to_str().unwrap()),
            "{why}"
        );
        let why =
            refusal(Kernel::load(image(&[7; 64], |header| header.xloadflags = 0).path(), &memory, &ranges));
        assert!(why.contains("no 64-bit entry"), "{why}");
        let why = refusal(Kernel::load(
            image(&[7; 64], |header| header.init_size = 64 << 20).path(),
            &memory,
            &ranges,
        ));
        assert!(why.contains("0x5000000") && why.contains("0x4000000"), "{why}");
        let why = refusal(Kernel::load("/nowhere".as_ref(), &memory, &ranges));
        assert!(why.contains("/nowhere") && why.contains("No such file"), "{why}");
        let why = refusal(Kernel::load(file(b"").path(), &memory, &ranges));
        assert!(why.contains("kernel"), "{why}");
        // The kernel is longer than RAM.
        let why = refusal(Kernel::load(image(&vec![7; 65 << 20], |_| ()).path(), &memory, &ranges));
        assert!(why.contains("fits into 67108864 bytes"), "{why}");
    }

    #[test]
    fn initrd_ends_where_low_ram_ends_and_not_in_the_kernel() {
        let (ram, ranges, memory) = machine(64);
        let kernel = Kernel::load(image(&[7; 64], |_| ()).path(), &memory, &ranges).unwrap();
        let initrd = file(&[9; 5000]);

        let (start, length) = write_initrd(&ram, initrd.path(), &kernel, 64 * MIB).unwrap();

        assert_eq!((u64::from(start), length), (64 * MIB - 8192, 5000));
        let mut bytes = [0; 5000];
        ram.block(0).read(start.into(), &mut bytes).unwrap();
        assert!(bytes == [9; 5000]);
        for (bytes, says) in [(41 << 20, "more RAM"), (100 << 20, "more RAM"), (0, "empty")] {
            let error = write_initrd(&ram, file(&vec![9; bytes]).path(), &kernel, 64 * MIB).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn command_line_that_is_too_long_is_refused() {
        let (ram, ranges, memory) = machine(64);
        let kernel = Kernel::load(image(&[7; 64], |_| ()).path(), &memory, &ranges).unwrap();
        write_command_line(&ram, &"a".repeat(2047), &kernel.header).unwrap();
        for line in ["a".repeat(2048), "a\0b".to_owned()] {
            let error = write_command_line(&ram, &line, &kernel.header).unwrap_err();
            assert!(error.to_string().contains("append"), "{error}");
        }
    }

    #[test]
    fn map_has_all_ram_but_the_hole_of_the_first_mib() {
        let ranges = [
            Range { block: 0, start: 0, len_bytes: 3 << 30 },
            Range { block: 1, start: 4 << 30, len_bytes: 1 << 30 },
        ];
        let map: Vec<_> =
            memory_map(&ranges).iter().map(|of| (of.addr, of.addr + of.size, of.r#type)).collect();
        assert_eq!(
            map,
            [(0, 0x9_fc00, RAM), (0xe_0000, MIB, ACPI), (MIB, 3 << 30, RAM), (4 << 30, 5 << 30, RAM)]
        );
    }
}
