//! Machine type, UUID and memory from a domain's XML, for a comparison with an image.
//!
//! libvirt starts the machine of the XML and loads the image into it. With the XML of another machine, the restore
//! fails. The saved guest may no longer exist at that time.

/// Machine type, UUID and memory of a domain; none for values that the XML lacks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Domain {
    machine: Option<String>,
    uuid: Option<[u8; 16]>,
    memory_bytes: Option<u64>,
}

/// The machine of an image, or of a guest that will be saved.
#[derive(Debug, Clone, Copy)]
pub struct DomainMachine<'a> {
    /// The machine type with its version, such as `pc-q35-7.2`.
    pub machine_type: &'a str,
    /// The guest's UUID, if it is known.
    pub uuid: Option<[u8; 16]>,
    /// Names of the RAM blocks, and their lengths in bytes.
    pub blocks: &'a [(String, u64)],
}

impl Domain {
    /// Reads the XML of a domain. A value that cannot be read counts as missing.
    pub fn of_xml(xml: &[u8]) -> Self {
        let mut domain = Self::default();
        let mut path: Vec<String> = Vec::new();
        let mut unit = None;
        let text = String::from_utf8_lossy(xml);
        let mut rest = text.as_ref();
        while let Some(at) = rest.find('<') {
            let content = rest[..at].trim();
            let names: Vec<&str> = path.iter().map(String::as_str).collect();
            match names[..] {
                ["domain", "uuid"] if !content.is_empty() => domain.uuid = uuid(content),
                ["domain", "memory"] if !content.is_empty() => {
                    domain.memory_bytes = bytes(content, unit.as_deref().unwrap_or("KiB"));
                }
                _ => {}
            }
            rest = &rest[at..];
            let end = [("<!--", "-->"), ("<![CDATA[", "]]>"), ("<?", "?>"), ("<", ">")]
                .into_iter()
                .find(|(begin, _)| rest.starts_with(begin))
                .and_then(|(begin, end)| Some((begin, rest.find(end)? + end.len())));
            let Some((begin, length)) = end else { break };
            let (tag, behind) = rest.split_at(length);
            rest = behind;
            if begin != "<" || tag.starts_with("<!") {
                continue;
            }
            let tag = tag.trim_start_matches('<').trim_end_matches('>');
            if tag.starts_with('/') {
                path.pop();
                continue;
            }
            let name =
                tag.split(|c: char| c.is_whitespace() || c == '/').next().unwrap_or_default().to_owned();
            path.push(name);
            let names: Vec<&str> = path.iter().map(String::as_str).collect();
            match names[..] {
                ["domain", "memory"] => unit = attribute(tag, "unit"),
                ["domain", "os", "type"] => domain.machine = attribute(tag, "machine"),
                _ => {}
            }
            if tag.ends_with('/') {
                path.pop();
            }
        }
        domain
    }

    /// The difference between `machine` and this domain, as a clause; none if they match.
    ///
    /// A value that only one side states is not compared.
    pub fn misfit(&self, machine: DomainMachine<'_>) -> Option<String> {
        if let Some(ours) = self.machine.as_deref().filter(|ours| !is_machine(ours, machine.machine_type)) {
            return Some(format!(
                "the XML is for a machine `{ours}`, but the guest's machine is a `{}`",
                machine.machine_type
            ));
        }
        if let (Some(ours), Some(theirs)) = (self.uuid, machine.uuid.filter(|uuid| *uuid != [0; 16]))
            && ours != theirs
        {
            return Some(format!(
                "the XML has the UUID {}, but the guest has {}",
                written(ours),
                written(theirs)
            ));
        }
        let memory: u64 =
            machine.blocks.iter().filter(|(name, _)| holds_memory(name)).map(|(_, bytes)| bytes).sum();
        let main = machine.blocks.iter().find(|(name, _)| name == "pc.ram").map(|(_, bytes)| *bytes);
        let ours = self.memory_bytes.filter(|ours| memory > 0 && *ours != memory && Some(*ours) != main)?;
        Some(format!("the XML has {} KiB of memory, but the guest has {} KiB", ours / 1024, memory / 1024))
    }

    /// The difference between both domains' UUIDs, as a clause; none if they match.
    pub fn misfit_of(&self, other: &Self) -> Option<String> {
        let (ours, theirs) = (self.uuid?, other.uuid?);
        (ours != theirs).then(|| {
            format!("the XML has the UUID {}, but the image's XML has {}", written(ours), written(theirs))
        })
    }
}

/// Whether a RAM block of this name contains a guest's main memory.
///
/// False for flash, firmware, ROM, tables and video memory.
pub fn holds_memory(name: &str) -> bool {
    let own = name.strip_prefix("/objects/").unwrap_or(name);
    let others = ["flash", "vram", "vga", "qxl", "mmaps[", " BAR "];
    !own.contains('/')
        && !own.ends_with(".rom")
        && !own.ends_with(".bios")
        && !others.iter().any(|other| own.contains(other))
}

/// Whether `name`, which may be an alias, can be the machine type `whole`.
fn is_machine(name: &str, whole: &str) -> bool {
    match name {
        _ if name == whole || whole.is_empty() => true,
        "pc" => whole.starts_with("pc-i440fx-"),
        "q35" => whole.starts_with("pc-q35-"),
        // The alias of another board is the machine type without its version.
        _ => !name.contains('-') && whole.strip_prefix(name).is_some_and(|version| version.starts_with('-')),
    }
}

/// The value of the attribute `name` in `tag`.
fn attribute(tag: &str, name: &str) -> Option<String> {
    let mut rest = tag;
    loop {
        let at = rest.find(name)?;
        let is_whole = rest[..at].ends_with(|c: char| c.is_whitespace());
        rest = &rest[at + name.len()..];
        let Some(value) = rest.trim_start().strip_prefix('=').filter(|_| is_whole) else { continue };
        let value = value.trim_start();
        let quote = value.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        return value[1..].split(quote).next().map(str::to_owned);
    }
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(number.to_be_bytes())
}

fn written(uuid: [u8; 16]) -> String {
    let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// Converts a number with libvirt's unit to bytes.
///
/// A suffix B means powers of 1000. No suffix, or iB, means powers of 1024.
fn bytes(number: &str, unit: &str) -> Option<u64> {
    let factor: u64 = match unit {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "K" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &[u8] = b"<?xml version='1.0'?>\n<!-- <memory>7</memory> -->\n<domain type='kvm'>
  <name>a&lt;b</name><uuid>5f0c8e1c-8d0e-4f3f-9a52-0c5a2f0b7d11</uuid>
  <memory dumpCore='off' unit='MiB'>64</memory><currentMemory unit='KiB'>1</currentMemory>
  <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type><boot dev='hd'/></os>
  <devices><disk><uuid>no</uuid></disk><memory model='dimm'><target><size>1</size></target></memory></devices>
</domain>";

    fn blocks(list: &[(&str, u64)]) -> Vec<(String, u64)> {
        list.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
    }

    fn misfit(xml: &str, machine_type: &str, uuid: Option<[u8; 16]>, list: &[(&str, u64)]) -> Option<String> {
        let blocks = blocks(list);
        Domain::of_xml(xml.as_bytes()).misfit(DomainMachine { machine_type, uuid, blocks: &blocks })
    }

    #[test]
    fn domain_of_xml_has_what_stands_at_its_place_and_nothing_else() {
        let domain = Domain::of_xml(XML);

        assert_eq!(domain.machine.as_deref(), Some("pc-q35-7.2"));
        assert_eq!(domain.memory_bytes, Some(64 << 20));
        assert_eq!(written(domain.uuid.unwrap()), "5f0c8e1c-8d0e-4f3f-9a52-0c5a2f0b7d11");
        for torn in 0..XML.len() {
            let _ = Domain::of_xml(&XML[..torn]);
        }
        assert_eq!(Domain::of_xml(b"<domain/>"), Domain::default());
    }

    #[test]
    fn misfit_of_another_machine_memory_or_uuid_names_both() {
        let xml = std::str::from_utf8(XML).unwrap();
        let ram: &[(&str, u64)] = &[("pc.ram", 64 << 20), ("pc.bios", 1), ("0000:00:02.0/vga.vram", 16)];
        let uuid = Domain::of_xml(XML).uuid;

        assert_eq!(misfit(xml, "pc-q35-7.2", uuid, ram), None);
        for (machine, uuid, ram, words) in [
            ("pc-q35-9.0", uuid, ram, ["`pc-q35-7.2`", "`pc-q35-9.0`"]),
            ("pc-q35-7.2", Some([1; 16]), ram, ["5f0c8e1c", "01010101-0101"]),
            ("pc-q35-7.2", uuid, &[("pc.ram", 128 << 20)], ["65536 KiB", "131072 KiB"]),
        ] {
            let why = misfit(xml, machine, uuid, ram).unwrap();
            assert!(words.iter().all(|word| why.contains(word)), "{why}");
        }
    }

    #[test]
    fn misfit_compares_only_what_both_state() {
        let ram: &[(&str, u64)] = &[("ram-node0", 1 << 20), ("ram-node1", 1 << 20), ("system.flash0", 9)];

        assert_eq!(misfit("<domain><memory>2048</memory></domain>", "x", Some([0; 16]), ram), None);
        assert_eq!(misfit("<domain><os><type machine='q35'/></os></domain>", "pc-q35-7.2", None, ram), None);
        assert!(misfit("<domain><os><type machine='pc'/></os></domain>", "pc-q35-7.2", None, ram).is_some());
        assert_eq!(misfit("<domain><memory unit='parsec'>1</memory></domain>", "x", None, ram), None);
        assert_eq!(misfit("<domain><memory>5</memory></domain>", "x", None, &[]), None);
    }
}
