//! Writes the ACPI tables, by which a kernel finds this machine's devices without firmware.
//!
//! The machine is *hardware-reduced*: its only fixed registers are one for sleep and one for reset, and it
//! has no system interrupt. Therefore no ACPI hardware is emulated, and no ACPI state migrates. The DSDT
//! describes the devices.

use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use sterna_ram::GuestRam;

use crate::error::VmmError;
use crate::layout::{
    IOAPIC_ADDRESS, KEYBOARD_PORT, KEYBOARD_RESET, LAPIC_ADDRESS, PANIC_PORT, RESET_VECTOR, SERIAL_IRQ,
    SERIAL_PORT, SLEEP_PORT, SLEEP_STATUS_PORT, SLEEP_TYPE_OFF, VIRTIO_BYTES, virtio_address,
    virtio_interrupt,
};

/// Address of the tables, the root first. Kernels search the first MiB for the root.
pub(crate) const TABLES: u64 = 0xe_0000;
const OEM: [u8; 6] = *b"STERNA";
const TABLE: [u8; 8] = *b"STERNAVM";
const REVISION: u32 = 1;
/// FADT, `IAPC_BOOT_ARCH`: the machine has no VGA and no CMOS clock.
const WITHOUT_VGA_AND_CMOS: u16 = 1 << 2 | 1 << 5;
/// First DSDT revision with 64-bit integers.
const DSDT_REVISION: u8 = 2;
const HEADER_BYTES: u32 = 36;

/// Writes the tables of a machine and returns the root's address.
pub(crate) fn write(ram: &GuestRam, vcpus: usize, virtio: usize) -> Result<u64, VmmError> {
    let mut at = (TABLES + Rsdp::len() as u64).next_multiple_of(16);
    let mut place = |bytes: &[u8]| -> Result<u64, VmmError> {
        let address = at;
        at = (address + bytes.len() as u64).next_multiple_of(16);
        if at > RESET_VECTOR {
            let why = format!("ACPI's tables end at {at:#x}, above {RESET_VECTOR:#x}");
            return Err(VmmError::Config { what: "devices", why });
        }
        ram.block(0).write(address, bytes)?;
        Ok(address)
    };
    let dsdt = place(dsdt(virtio).as_slice())?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(place(&bytes(&fadt(dsdt)))?);
    xsdt.add_entry(place(&bytes(&madt(vcpus)))?);
    let root = Rsdp::new(OEM, place(&bytes(&xsdt))?);
    ram.block(0).write(TABLES, &bytes(&root))?;
    Ok(TABLES)
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn madt(vcpus: usize) -> MADT {
    let mut madt = MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(LAPIC_ADDRESS));
    for id in 0..vcpus as u8 {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IOAPIC_ADDRESS, 0));
    madt
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = WITHOUT_VGA_AND_CMOS.into();
    (fadt.reset_reg, fadt.reset_value) = (port(KEYBOARD_PORT), KEYBOARD_RESET);
    (fadt.sleep_control_reg, fadt.sleep_status_reg) = (port(SLEEP_PORT), port(SLEEP_STATUS_PORT));
    fadt.finalize()
}

fn dsdt(virtio: usize) -> Sdt {
    let serial_ports = IO::new(SERIAL_PORT, SERIAL_PORT, 0, 8);
    let serial_interrupt = Interrupt::new(true, true, false, false, SERIAL_IRQ);
    let serial_resources = ResourceTemplate::new(vec![&serial_ports, &serial_interrupt]);
    let (serial_kind, serial_id) = (EISAName::new("PNP0501"), 0u8);
    let (kind, id) = (Name::new("_HID".into(), &serial_kind), Name::new("_UID".into(), &serial_id));
    let resources = Name::new("_CRS".into(), &serial_resources);
    let serial = Device::new("COM1".into(), vec![&kind, &id, &resources]);

    let panic_ports = IO::new(PANIC_PORT, PANIC_PORT, 0, 1);
    let panic_resources = ResourceTemplate::new(vec![&panic_ports]);
    let panic_kind = Name::new("_HID".into(), &"QEMU0001");
    let panic_resources = Name::new("_CRS".into(), &panic_resources);
    let panic = Device::new("PEVT".into(), vec![&panic_kind, &panic_resources]);

    let devices = Scope::new(Path::new("_SB_"), vec![&serial, &panic]);
    let virtio: Vec<u8> = (0..virtio).flat_map(virtio_device).collect();
    let off = Package::new(vec![&SLEEP_TYPE_OFF]);
    let off = Name::new("_S5_".into(), &off);
    let mut dsdt = Sdt::new(*b"DSDT", HEADER_BYTES, DSDT_REVISION, OEM, TABLE, REVISION);
    for part in [bytes(&devices), virtio, bytes(&off)] {
        dsdt.vec(&part);
    }
    dsdt.update_checksum();
    dsdt
}

/// DSDT entry of the virtio device in slot `slot`.
fn virtio_device(slot: usize) -> Vec<u8> {
    let registers = Memory32Fixed::new(true, virtio_address(slot) as u32, VIRTIO_BYTES as u32);
    let interrupt = Interrupt::new(true, true, false, false, virtio_interrupt(slot));
    let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
    let (number, coherent) = (slot as u8, 1u8);
    let (kind, id) = (Name::new("_HID".into(), &"LNRO0005"), Name::new("_UID".into(), &number));
    let (resources, coherent) = (Name::new("_CRS".into(), &resources), Name::new("_CCA".into(), &coherent));
    let name = format!("VR{slot:02X}");
    let device = Device::new(Path::new(&name), vec![&kind, &id, &coherent, &resources]);
    bytes(&Scope::new(Path::new("_SB_"), vec![&device]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_ram::{Backing, RamBlock};

    #[test]
    fn tables_are_found_from_the_root_and_their_checksums_are_right() {
        for (vcpus, virtio) in [(1, 0), (8, 8)] {
            let block = RamBlock::new("low", 1 << 20, Backing::Anonymous).unwrap();
            let ram = GuestRam::new(vec![block]).unwrap();
            let root = write(&ram, vcpus, virtio).unwrap();
            let read = |at: u64, length: usize| {
                let mut bytes = vec![0; length];
                ram.block(0).read(at, &mut bytes).unwrap();
                bytes
            };
            let word = |at| ram.block(0).read_u64(at).unwrap();
            let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            // The root does not align the XSDT's address.
            let address = |at: u64| u64::from_le_bytes(read(at, 8).try_into().unwrap());
            let table = |at: u64| {
                let length = u32::from_le_bytes(read(at + 4, 4).try_into().unwrap());
                let bytes = read(at, length as usize);
                assert_eq!(sum(&bytes), 0, "{:?}", &bytes[..4]);
                bytes
            };

            assert_eq!(sum(&read(root, Rsdp::len())), 0);
            assert_eq!(word(root), u64::from_le_bytes(*b"RSD PTR "));
            let xsdt = address(root + 24);
            assert_eq!(&table(xsdt)[..4], b"XSDT");
            let fadt = table(address(xsdt + 36));
            assert_eq!(&fadt[..4], b"FACP");
            assert_eq!(&table(u64::from_le_bytes(fadt[140..148].try_into().unwrap()))[..4], b"DSDT");
            let madt = table(address(xsdt + 44));
            assert_eq!((&madt[..4], madt.len()), (&b"APIC"[..], 44 + 8 * vcpus + 12));
        }
    }
}
