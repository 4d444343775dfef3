//! Follows a processor's page tables through guest memory.
//!
//! All x86 formats are supported: 32-bit with and without 4 MiB pages, PAE, four and five levels. Tables come from a
//! guest and can contain anything, even cycles. Therefore the number of tables and mappings is limited.

use super::registers::Registers;

/// A range of virtual addresses that is contiguous in physical memory, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// First virtual address of the range.
    pub virtual_address: u64,
    /// Physical address of the range.
    pub physical_address: u64,
    /// Length of the range in bytes.
    pub length_bytes: u64,
}

/// The mappings of all tables.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mappings {
    /// In ascending order of virtual addresses. Ranges that are adjacent in virtual and physical memory are merged.
    pub list: Vec<Mapping>,
    /// Whether all tables were followed. False if they exceed the limits: 2^18 tables or 2^20 mappings.
    pub is_whole: bool,
}

/// One page of a table.
pub type Table = [u8; 4096];
/// Reads the page of physical memory at an address; false if no memory is there.
pub type ReadPage<'a> = dyn FnMut(u64, &mut Table) -> bool + 'a;

const MOST_TABLES: usize = 1 << 18;
const MOST_MAPPINGS: usize = 1 << 20;
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Follows a processor's page tables; `None` if the processor does not use paging.
pub fn mappings(registers: &Registers, read: &mut ReadPage<'_>) -> Option<Mappings> {
    let [cr0, _, _, cr3, cr4] = registers.control;
    if cr0 & 1 << 31 == 0 {
        return None;
    }
    let mut walk = Walk { read, tables: 0, found: Mappings { is_whole: true, ..Mappings::default() } };
    if cr4 & 1 << 5 == 0 {
        walk.narrow(cr3 & 0xffff_f000, cr4 & 1 << 4 != 0);
    } else if registers.is_long_mode() {
        let levels = if cr4 & 1 << 12 != 0 { 5 } else { 4 };
        walk.wide(cr3 & ADDRESS, 0, 512, levels, levels);
    } else {
        walk.wide(cr3 & 0xffff_ffe0, 0, 4, 3, 3);
    }
    Some(walk.found)
}

struct Walk<'a, 'r> {
    read: &'a mut ReadPage<'r>,
    tables: usize,
    found: Mappings,
}

impl Walk<'_, '_> {
    /// Reads a table of `count` entries of 8 bytes at `at`. Its level is `level` of `top`.
    fn wide(&mut self, at: u64, base: u64, count: usize, level: u32, top: u32) {
        let Some(table) = self.table(at) else { return };
        let shift = 12 + 9 * (level - 1);
        // PAE's top table has four entries and may start inside a page.
        let first = (at & 0xfff) as usize / 8;
        for index in 0..count {
            let Some(entry) = table.get((first + index) * 8..(first + index + 1) * 8) else { break };
            let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
            if entry & PRESENT == 0 {
                continue;
            }
            let mut address = base | (index as u64) << shift;
            if level == top && top > 3 && index >= 256 {
                // Addresses are canonical: the highest bit is repeated up to bit 63.
                address |= u64::MAX << (shift + 9);
            }
            let size = 1u64 << shift;
            if level == 1 || (level <= 3 && entry & LARGE != 0 && !(level == 3 && top == 3)) {
                self.add(address, entry & ADDRESS & !(size - 1), size);
            } else {
                self.wide(entry & ADDRESS, address, 512, level - 1, top);
            }
        }
    }

    /// Reads two levels of tables with entries of 4 bytes.
    fn narrow(&mut self, at: u64, has_large: bool) {
        let Some(directory) = self.table(at) else { return };
        for (index, entry) in entries(&directory) {
            let base = index << 22;
            if entry & PRESENT == 0 {
                continue;
            }
            if has_large && entry & LARGE != 0 {
                self.add(base, entry & 0xffc0_0000 | (entry >> 13 & 0xff) << 32, 4 << 20);
                continue;
            }
            let Some(table) = self.table(entry & 0xffff_f000) else { continue };
            for (index, entry) in entries(&table).filter(|(_, entry)| entry & PRESENT != 0) {
                self.add(base | index << 12, entry & 0xffff_f000, 4096);
            }
        }
    }

    fn table(&mut self, at: u64) -> Option<Table> {
        if self.tables >= MOST_TABLES {
            self.found.is_whole = false;
            return None;
        }
        self.tables += 1;
        let mut table = [0; 4096];
        (self.read)(at & !0xfff, &mut table).then_some(table)
    }

    fn add(&mut self, virtual_address: u64, physical_address: u64, length_bytes: u64) {
        if let Some(last) = self.found.list.last_mut()
            && last.virtual_address.wrapping_add(last.length_bytes) == virtual_address
            && last.physical_address.wrapping_add(last.length_bytes) == physical_address
        {
            last.length_bytes += length_bytes;
        } else if self.found.list.len() < MOST_MAPPINGS {
            self.found.list.push(Mapping { virtual_address, physical_address, length_bytes });
        } else {
            self.found.is_whole = false;
        }
    }
}

fn entries(table: &Table) -> impl Iterator<Item = (u64, u64)> {
    let entry = |bytes: &[u8]| u64::from(u32::from_le_bytes(bytes.try_into().unwrap_or_default()));
    table.chunks_exact(4).enumerate().map(move |(index, bytes)| (index as u64, entry(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory whose pages contain entries of 8 (or 4) bytes.
    fn memory(tables: &[(u64, usize, usize, u64)]) -> impl FnMut(u64, &mut Table) -> bool {
        let tables = tables.to_vec();
        move |at, table| {
            for (_, index, width, entry) in tables.iter().filter(|table| table.0 == at) {
                let bytes = entry.to_le_bytes();
                table[index * width..(index + 1) * width].copy_from_slice(&bytes[..*width]);
            }
            tables.iter().any(|table| table.0 == at)
        }
    }

    fn registers(cr3: u64, cr4: u64, efer: u64) -> Registers {
        Registers { control: [1 << 31 | 1, 0, 0, cr3, cr4], efer, ..Registers::default() }
    }

    fn found(registers: &Registers, tables: &[(u64, usize, usize, u64)]) -> Vec<(u64, u64, u64)> {
        let mappings = mappings(registers, &mut memory(tables)).unwrap();
        assert!(mappings.is_whole);
        mappings.list.iter().map(|m| (m.virtual_address, m.physical_address, m.length_bytes)).collect()
    }

    #[test]
    fn mappings_four_levels_with_all_page_sizes_are_found() {
        let tables = [
            (0x1000, 0, 8, 0x2003),
            (0x1000, 511, 8, 0x2003),
            (0x2000, 0, 8, 0x3003),
            (0x2000, 1, 8, 0x4000_0083),
            (0x3000, 0, 8, 0x4003),
            (0x3000, 1, 8, 0x20_0083),
            (0x4000, 510, 8, 0x8000_0000_0000_a003),
            (0x4000, 511, 8, 0xb003),
        ];

        let list = found(&registers(0x1000, 1 << 5, 1 << 10), &tables);

        let high = 0xffff_ff80_0000_0000;
        assert_eq!(
            list,
            [
                (0x1fe000, 0xa000, 0x2000),
                (0x20_0000, 0x20_0000, 0x20_0000),
                (0x4000_0000, 0x4000_0000, 0x4000_0000),
                (high + 0x1fe000, 0xa000, 0x2000),
                (high + 0x20_0000, 0x20_0000, 0x20_0000),
                (high + 0x4000_0000, 0x4000_0000, 0x4000_0000),
            ]
        );
    }

    #[test]
    fn mappings_32_bit_and_pae_are_found() {
        let narrow = [(0x1000, 1, 4, 0x2003), (0x1000, 2, 4, 0x0080_0083), (0x2000, 3, 4, 0x9003)];
        let pae = [(0x1000, 4 + 3, 8, 0x2001), (0x2000, 0, 8, 0x60_0083)];

        assert_eq!(
            found(&registers(0x1000, 1 << 4, 0), &narrow),
            [(0x40_3000, 0x9000, 0x1000), (0x80_0000, 0x80_0000, 0x40_0000)]
        );
        assert_eq!(found(&registers(0x1020, 1 << 5, 0), &pae), [(0xc000_0000, 0x60_0000, 0x20_0000)]);
    }

    #[test]
    fn mappings_circular_tables_end() {
        let mut everywhere = |_: u64, table: &mut Table| {
            for entry in table.chunks_exact_mut(8) {
                entry.copy_from_slice(&0x1003u64.to_le_bytes());
            }
            true
        };

        let mappings = mappings(&registers(0x1000, 1 << 5 | 1 << 12, 1 << 10), &mut everywhere).unwrap();

        assert!(!mappings.is_whole && mappings.list.len() <= MOST_MAPPINGS);
    }

    #[test]
    fn mappings_without_paging_are_none() {
        assert_eq!(mappings(&Registers::default(), &mut |_, _| true), None);
    }
}
