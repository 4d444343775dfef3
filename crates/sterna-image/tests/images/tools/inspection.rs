//! The description of an image, and its picture.

use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::inspect::inspect;
use sterna_image::tools::picture::picture;

use super::sample::{Plan, describe, holds, open};
use crate::common::vector;

#[test]
fn inspect_sample_tells_blocks_devices_and_state() {
    let image = open(Plan { uuid: Some([0x11; 16]), ..Plan::default() }.build().bytes);

    let it = inspect(&image, &Coverage::of(&image).unwrap()).unwrap();

    assert_eq!((it.kind.as_str(), it.form, it.compression), ("mapped-ram", "mapped-ram", "none"));
    assert_eq!(it.uuid.as_deref(), Some("11111111-1111-1111-1111-111111111111"));
    assert_eq!(it.run_state.as_deref(), Some("running"));
    assert_eq!(it.commands, [11]);
    assert!(it.has_end && it.has_eof && !it.was_streamed && it.trailing_bytes == 0);
    let names: Vec<_> = it.blocks.iter().map(|block| (block.name.as_str(), block.pages)).collect();
    assert_eq!(names, [("pc.ram", 150), ("/rom@etc/acpi/tables", 32), ("pc.bios", 64), ("one", 1)]);
    for (index, block) in it.blocks.iter().enumerate() {
        let data = (0..block.pages as usize).filter(|page| holds(index, *page)).count() as u64;
        assert_eq!((block.data_pages, block.zero_pages, block.absent_pages), (data, block.pages - data, 0));
        assert!(block.pages_offset > block.bitmap_offset);
    }
    let devices: Vec<_> = it.devices.iter().map(|d| (d.name.as_str(), d.bytes, d.is_described)).collect();
    assert_eq!(devices[0], ("timer", 24, true));
    assert_eq!((devices.len(), devices[1].0, devices[2]), (3, "trap", ("globalstate", 104, true)));
}

#[test]
fn inspect_tells_how_ram_is_split_of_pcs_alone() {
    for (machine, block, is_split) in
        [("pc-q35-10.0", "pc.ram", true), ("virt", "riscv_virt_board.ram", false), ("none", "ram", false)]
    {
        let image = open(Plan { machine, blocks: vec![(block, 150)], ..Plan::default() }.build().bytes);

        let it = inspect(&image, &Coverage::of(&image).unwrap()).unwrap();

        assert_eq!(it.split.is_some(), is_split, "{machine}");
    }
}

#[test]
fn inspect_of_a_description_that_is_wrong_lists_all_devices_and_says_so() {
    let plan = Plan::default();
    let mut told = plan.devices.clone();
    told[0].1.push(0);
    let wrong = Plan { description: Some(describe(&told, &["mapped-ram"])), ..plan.clone() }.build();
    let sample = plan.build();
    for (bytes, is_whole) in [
        (sample.bytes.clone(), true),
        (wrong.bytes, true),
        (sample.bytes[..sample.eof - 2].to_vec(), false),
        (sample.edited(|bytes, sample| bytes[sample.devices] = 9), false),
    ] {
        let image = open(bytes);

        let it = inspect(&image, &Coverage::of(&image).unwrap()).unwrap();

        assert_eq!(it.is_told_apart, is_whole, "{:?}", it.devices);
        assert_eq!(it.devices.len() == plan.devices.len(), is_whole, "{:?}", it.devices);
    }
}

#[test]
fn inspect_real_images_of_one_guest_agree_in_both_forms() {
    let of = |name| {
        let image = open(vector(name));
        inspect(&image, &Coverage::of(&image).unwrap()).unwrap()
    };
    let (mapped, legacy) = (of("file-mapped-ram"), of("file-legacy"));

    assert!(legacy.was_streamed && !mapped.was_streamed);
    let blocks = |it: &sterna_image::tools::inspect::Inspection| {
        it.blocks.iter().map(|b| (b.name.clone(), b.data_pages, b.zero_pages)).collect::<Vec<_>>()
    };
    let devices = |it: &sterna_image::tools::inspect::Inspection| {
        it.devices.iter().map(|d| (d.name.clone(), d.instance, d.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(blocks(&mapped), blocks(&legacy));
    assert_eq!(devices(&mapped), devices(&legacy));
    assert!(mapped.devices.iter().all(|device| device.is_described));
    assert_eq!(serde_json::to_value(&mapped).unwrap()["packing"], "none", "the key that readers know");
}

#[test]
fn picture_shows_every_block_and_closes_every_element() {
    let capabilities = vec!["x-ignore-shared", "mapped-ram"];
    let blocks = vec![("pc.ram", 3000), ("sha<red>\"", 64), ("one", 1)];
    let plan =
        Plan { capabilities, shared: vec!["sha<red>\""], blocks, description: None, ..Plan::default() };
    let image = open(plan.build().bytes);
    let coverage = Coverage::of(&image).unwrap();

    let svg = picture(&inspect(&image, &coverage).unwrap(), &coverage);

    assert!(svg.contains("pc.ram") && svg.contains("sha&lt;red&gt;&quot;") && !svg.contains("sha<red"));
    assert!(svg.contains("class=\"n\"") && svg.contains("not in the image"));
    for element in ["svg", "text", "title", "pattern", "defs", "style"] {
        let opened =
            svg.matches(&format!("<{element} ")).count() + svg.matches(&format!("<{element}>")).count();
        assert_eq!(opened, svg.matches(&format!("</{element}>")).count(), "{element}");
    }
}
