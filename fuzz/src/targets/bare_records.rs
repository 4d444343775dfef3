//! RAM records without sections, as on a preempt channel. The target skips the pages' bytes.

use sterna_wire::PAGE_SIZE;
use sterna_wire::multifd::BlockTable;
use sterna_wire::ram::{BareRecord, BareRecordReader, RamRecordWriter};

const BLOCKS: [(&str, u64); 2] = [("m0", 1 << 20), ("rom", 1 << 16)];

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let table = BlockTable::new(BLOCKS.map(|(name, length)| (name.to_owned(), length)));
    let Ok(table) = table else { return };
    let (mut reader, mut at) = (BareRecordReader::new(), 0);
    while let Ok(Some((record, used))) = reader.decode(&table, &data[at..]) {
        assert!(used > 0);
        at += used;
        let mut again = Vec::new();
        let (block, offset) = match record {
            BareRecord::Zero { block, offset } => {
                RamRecordWriter::new().zero(block, BLOCKS[block].0, offset, &mut again).unwrap();
                (block, offset)
            }
            BareRecord::Page { block, offset } => {
                RamRecordWriter::new().page_header(block, BLOCKS[block].0, offset, &mut again).unwrap();
                at = data.len().min(at + PAGE_SIZE);
                (block, offset)
            }
            BareRecord::End => continue,
        };
        assert!(offset % PAGE_SIZE as u64 == 0 && offset < BLOCKS[block].1);
        let (twice, _) = BareRecordReader::new().decode(&table, &again).unwrap().unwrap();
        assert_eq!(twice, record);
    }
}
