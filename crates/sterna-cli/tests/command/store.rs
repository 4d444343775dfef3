//! Images in Sterna's own format as users work on them: stores, layers, keys, and what wrong inputs get.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;

use crate::convert::Killed;

const PAGE: usize = 4096;

/// A directory with a store and keys, in which commands run.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        std::fs::write(place.path("key"), [1; 32]).unwrap();
        std::fs::write(place.path("other-key"), [2; 32]).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a command line in the directory.
    fn run(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        command.current_dir(self.0.path()).args(line.split_whitespace());
        command.output().unwrap()
    }

    /// The standard output of a command that succeeds.
    fn does(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.does(&format!("{line} --json"))).unwrap()
    }

    /// The message of a command that ends with `status`.
    fn fails(&self, status: i32, line: &str) -> String {
        let output = self.run(line);
        let said =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(status), "{line}: {said}");
        said
    }

    /// Writes a stream of a guest with these pages as an image.
    fn image(&self, name: &str, pages: &[u8], more: &str) {
        let mut file = std::fs::File::create(self.path("stream")).unwrap();
        file.write_all(&head(pages.len())).unwrap();
        for (number, fill) in pages.iter().enumerate() {
            file.write_all(&page(number, &[*fill; PAGE])).unwrap();
        }
        file.write_all(&tail()).unwrap();
        self.does(&format!("convert stream {name} {more}"));
    }

    /// Whether two images have the same memory and devices.
    fn are_same(&self, a: &str, b: &str, more: &str) -> bool {
        self.run(&format!("diff {a} {b} {more}")).status.success()
    }
}

/// The head of a legacy stream with one block `m`.
fn head(pages: usize) -> Vec<u8> {
    let bytes = (pages * PAGE) as u64;
    let mut out = b"QEVM\0\0\0\x03\x07\0\0\0\x04none".to_vec();
    out.extend(b"\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04");
    out.extend((bytes | 4).to_be_bytes());
    out.extend(b"\x01m");
    out.extend(bytes.to_be_bytes());
    out.extend(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
    out.extend(b"\x02\0\0\0\x01");
    out
}

/// A record of a page.
fn page(number: usize, content: &[u8]) -> Vec<u8> {
    let flags = if number == 0 { 0x08 } else { 0x28 };
    let mut out = ((number * PAGE) as u64 | flags).to_be_bytes().to_vec();
    if number == 0 {
        out.extend(b"\x01m");
    }
    out.extend(content);
    out
}

/// The end of RAM, and a device.
fn tail() -> Vec<u8> {
    let end = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01";
    let device = b"\x04\0\0\0\x02\x01d\0\0\0\0\0\0\0\x01body\x7e\0\0\0\x02\0";
    [&end[..], b"\x03\0\0\0\x01", end, device].concat()
}

#[test]
fn store_lists_checks_and_collects_its_images() {
    let place = Place::new();
    place.image("store:s#one", &[1, 2, 3, 4], "");
    place.image("store:s#two", &[1, 2, 3, 5], "");

    let listed = place.json("store ls s");
    let names: Vec<&str> =
        listed["images"].as_array().unwrap().iter().map(|image| image["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["one", "two"]);
    assert_eq!(place.json("store check store:s")["sound"], true);
    let before = place.json("store stat s");
    assert_eq!((&before["names"], &before["leases"]), (&Value::from(2), &Value::from(0)));
    place.does("store rm store:s#one");
    let collected = place.json("store gc s");
    // Frames of the devices are in the first pack, and of both images.
    assert_eq!((&collected["images"], &collected["packs"]), (&Value::from(1), &Value::from(0)));
    assert_eq!(place.json("store stat s")["names"], 1);
    assert!(place.does("store ls s").contains("two"));
    place.does("verify store:s#two");
    // Out of the store and back: the same bytes.
    place.does("convert store:s#two back --format legacy");
    assert!(std::fs::read(place.path("back")).unwrap() == std::fs::read(place.path("stream")).unwrap());
    place.does("store rm store:s#two");
    let collected = place.json("store gc s");
    assert_eq!((&collected["images"], &collected["packs"]), (&Value::from(1), &Value::from(2)));
    assert_eq!(place.json("store stat s")["pack_bytes"], 0);
}

#[test]
fn wrong_arguments_of_store_commands_are_refused_with_advice() {
    let place = Place::new();
    place.image("store:s#one", &[1], "");
    place.image("plain.sterna", &[1], "");

    for (line, word) in [
        ("store ls store:s#one", "give the store alone"),
        ("store ls nothing", "no such file"),
        ("store ls plain.sterna", "no directory"),
        ("store rm plain.sterna", "store:DIRECTORY#NAME"),
        ("store rm store:s", "store:DIRECTORY#NAME"),
        ("store rm store:s#two", "store:s#two"),
        ("inspect store:s#two", "store:s#two"),
        ("inspect store:s", "store:DIRECTORY#NAME"),
        ("convert plain.sterna store:s#.hidden", "not a name"),
        ("convert plain.sterna store:s#one", "exists"),
        ("convert plain.sterna x.sterna --level 23", "0 to 22, or auto"),
        ("convert plain.sterna x.sterna --extent 100k", "power of two"),
        ("convert plain.sterna store:s#layer --base plain.sterna", "not in the store"),
        ("repair plain.sterna --output x", "nothing to repair"),
        ("flatten store:s#one", "--output"),
    ] {
        let said = place.fails(2, line);
        assert!(said.contains(word), "{line}: {said}");
    }
    assert_eq!(place.json("store check s")["sound"], true);
}

#[test]
fn damaged_pack_or_index_is_found_and_hides_no_other_image() {
    let place = Place::new();
    place.image("store:s#one", &[1, 2, 3, 4], "");
    place.image("store:s#two", &[5, 6, 7, 8], "");
    let files = |kind: &str| -> Vec<PathBuf> {
        place.path("s").join(kind).read_dir().unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let pack = &files("packs")[0];
    let mut bytes = std::fs::read(pack).unwrap();
    bytes[20] ^= 1;
    std::fs::write(pack, &bytes).unwrap();

    let said = place.fails(1, "store check s");
    assert_eq!((said.matches("sound").count(), said.matches("frame").count()), (1, 1), "{said}");
    bytes[20] ^= 1;
    std::fs::write(pack, &bytes).unwrap();
    let index = &files("images")[0];
    let mut bytes = std::fs::read(index).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(index, bytes).unwrap();

    let said = place.fails(1, "store check s");
    assert_eq!((said.matches("sound").count(), said.matches("the index").count()), (1, 1), "{said}");
    assert_eq!(place.does("store ls s").lines().count(), 2);
    // The packs of a damaged index are not known, so that nothing is removed.
    place.fails(2, "store gc s");
    assert_eq!(files("packs").len(), 2);
}

#[test]
fn missing_and_wrong_keys_are_refused_by_every_command() {
    let place = Place::new();
    place.image("secret.sterna", &[1, 2, 3], "--key key");
    place.image("store:s#secret", &[1, 2, 3], "--key key");
    place.image("plain.sterna", &[1, 2, 3], "");

    for image in ["secret.sterna", "store:s#secret"] {
        for command in [
            "inspect IMAGE",
            "verify IMAGE",
            "extract IMAGE out --block m",
            "diff IMAGE IMAGE",
            "restore IMAGE /nothing",
            "restore IMAGE /nothing --lazy",
            "restore IMAGE send:unix:/nothing",
            "serve IMAGE unix:/nothing",
            "serve IMAGE uffd:x.sock",
            "repair IMAGE --output out",
        ] {
            let line = command.replace("IMAGE", image);
            assert!(place.fails(2, &line).contains("--key"), "{line}");
            let said = place.fails(2, &format!("{line} --key other-key"));
            assert!(said.contains("key") && !said.contains("cannot connect"), "{line}: {said}");
        }
        for command in
            ["convert IMAGE out", "convert IMAGE out --source-key other-key", "flatten IMAGE -o out"]
        {
            assert!(place.fails(2, &command.replace("IMAGE", image)).contains("key"));
        }
        place.does(&format!("verify {image} --key key"));
        place.does(&format!("inspect {image} --key key"));
        place.does(&format!("convert {image} back --format legacy --source-key key --force"));
        assert!(std::fs::read(place.path("back")).unwrap() == std::fs::read(place.path("stream")).unwrap());
    }
    // A key says that only its holders can have written the image.
    for line in ["verify plain.sterna --key key", "verify stream --key key", "inspect stream --key key"] {
        assert!(place.fails(2, line).contains("not encrypted"), "{line}");
    }
    let listed = place.json("store ls s");
    assert_eq!(listed["images"][0]["readable"], false);
    assert!(!place.does("store ls s").contains("secret"));
    assert!(place.does("store ls s --key key").contains("secret"));
    assert!(place.fails(1, "store check s").contains("--key"));
    assert_eq!(place.json("store check s --key key")["sound"], true);
    assert!(place.fails(2, "store gc s").contains("--key"));
    assert!(place.fails(2, "store rm store:s#secret").contains("--key"));
    place.does("store rm store:s#secret --key key");
    assert_eq!(place.json("store gc s")["images"], 1);
    assert!(place.fails(2, "verify secret.sterna --key stream").contains("not a key"));
}

#[test]
fn layers_are_made_rebased_and_flattened_and_their_base_is_found() {
    let place = Place::new();
    place.image("a.sterna", &[1, 2, 3, 4], "");
    place.image("b.sterna", &[1, 9, 3, 0], "");
    place.image("c.sterna", &[7, 9, 3, 0], "");

    place.does("diff a.sterna b.sterna --output layer.sterna");
    assert!(place.are_same("b.sterna", "layer.sterna", ""));
    let frames = &place.json("inspect layer.sterna")["frames"];
    assert_eq!((&frames["layers"], &frames["held_pages"]), (&Value::from(2), &Value::from(1)));
    place.does("rebase layer.sterna c.sterna -o other.sterna");
    assert!(place.are_same("b.sterna", "other.sterna", ""));
    std::fs::create_dir(place.path("bases")).unwrap();
    std::fs::rename(place.path("a.sterna"), place.path("bases/moved")).unwrap();
    let digest = place.json("inspect bases/moved")["frames"]["digest"].as_str().unwrap().to_owned();

    let said = place.fails(2, "verify layer.sterna");
    assert!(said.contains(&digest) && said.contains("a.sterna") && said.contains("--base"), "{said}");
    for base in ["bases", "bases/moved"] {
        place.does(&format!("verify layer.sterna --base {base}"));
        place.does(&format!("extract layer.sterna out --block m --force --base {base}"));
        let raw = std::fs::read(place.path("out")).unwrap();
        assert_eq!([raw[0], raw[PAGE], raw[2 * PAGE], raw[3 * PAGE]], [1, 9, 3, 0]);
    }
    place.does("convert bases/moved store:s#a --format sterna");
    place.does("convert layer.sterna x.sterna --source-base bases");
    assert!(place.are_same("b.sterna", "x.sterna", ""));
    place.fails(2, "flatten layer.sterna");
    place.does("flatten layer.sterna --source-base bases");
    place.does("verify layer.sterna");
    assert_eq!(place.json("inspect layer.sterna")["frames"]["layers"], 1);
    assert!(place.are_same("b.sterna", "layer.sterna", ""));
    // A layer of a file over an image of a store.
    place.does("convert b.sterna y.sterna --base store:s#a");
    assert!(place.fails(2, "verify y.sterna").contains("--base"));
    place.does("verify y.sterna --base store:s#a");
    assert!(place.are_same("b.sterna", "y.sterna", "--base store:s#a"));
}

#[test]
fn base_that_was_replaced_or_that_loops_is_refused_with_its_digest() {
    let place = Place::new();
    place.image("a.sterna", &[1, 2, 3, 4], "");
    place.image("b.sterna", &[1, 9, 3, 0], "");
    place.does("diff a.sterna b.sterna --output layer.sterna");
    let digest = place.json("inspect a.sterna")["frames"]["digest"].as_str().unwrap().to_owned();

    // Commands that would make a loop, and destroy what the layer needs.
    for line in
        ["rebase a.sterna layer.sterna", "rebase layer.sterna layer.sterna", "rebase a.sterna a.sterna"]
    {
        assert!(place.fails(2, line).contains("needs it"), "{line}");
    }
    assert!(place.fails(2, "convert b.sterna a.sterna --base layer.sterna --force").contains("needs it"));
    assert!(place.are_same("b.sterna", "layer.sterna", ""));
    // A loop of names: the base is a layer over a layer of the base.
    let kept = std::fs::read(place.path("a.sterna")).unwrap();
    std::fs::copy(place.path("layer.sterna"), place.path("a.sterna")).unwrap();
    for line in ["verify layer.sterna", "inspect layer.sterna", "convert layer.sterna out"] {
        let output = place.run(line);
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success() && said.contains(&digest), "{line}: {said}");
    }
    std::fs::write(place.path("a.sterna"), kept).unwrap();
    place.does("verify layer.sterna");
}

#[test]
fn save_into_a_store_that_is_killed_harms_no_image_and_its_packs_are_collected() {
    // Noise, so that no two pages are equal.
    let mut noise = 1u64;
    let mut draw = || {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (noise >> 8).to_le_bytes()
    };
    let place = Place::new();
    place.image("store:s#sound", &[1, 2, 3], "");
    let pages = (40 << 20) / PAGE;
    let mut saving = Command::new(env!("CARGO_BIN_EXE_sterna"));
    saving.current_dir(place.0.path()).args(["convert", "-", "store:s#killed", "--level", "0"]);
    let saving = saving.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut saving = Killed(saving);
    let mut input = saving.0.stdin.take().unwrap();
    input.write_all(&head(pages + 1)).unwrap();
    for number in 0..pages {
        let content: Vec<u8> = (0..PAGE / 8).flat_map(|_| draw()).collect();
        input.write_all(&page(number, &content)).unwrap();
    }
    let packs = |place: &Place| place.path("s/packs").read_dir().unwrap().count();
    let deadline = Instant::now() + Duration::from_secs(60);
    while packs(&place) < 2 {
        assert!(Instant::now() < deadline, "no pack of the save");
        std::thread::sleep(Duration::from_millis(10));
    }

    // SIGKILL: the command cleans nothing up.
    saving.0.kill().unwrap();
    saving.0.wait().unwrap();

    assert_eq!(place.json("store check s")["sound"], true);
    assert!(!place.does("store ls s").contains("killed"));
    // For a day, the save may still run on another host.
    let collected = place.json("store gc s");
    assert_eq!((&collected["running_saves"], &collected["packs"]), (&Value::from(1), &Value::from(0)));
    assert_eq!(packs(&place), 2);
    place.image("store:s#later", &[1, 2, 3, 4], "");
    age(&place.path("s/leases"));

    let collected = place.json("store gc s");

    assert_eq!((&collected["dead_leases"], &collected["packs"]), (&Value::from(1), &Value::from(1)));
    assert_eq!(place.json("store check s")["sound"], true);
    assert_eq!(place.json("store stat s")["names"], 2);
    place.does("verify store:s#later");
}

/// Makes every file of the directory two days old.
fn age(directory: &Path) {
    for entry in directory.read_dir().unwrap() {
        let file = std::fs::File::options().write(true).open(entry.unwrap().path()).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(48 * 3600)).unwrap();
    }
}
