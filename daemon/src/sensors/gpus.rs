//! Which processes hold a GPU: from the address that the kernel's log names it by to the device file
//! that processes have open.
//!
//! NVIDIA's driver tells the minor number of `/dev/nvidiaN` in
//! `/proc/driver/nvidia/gpus/0000:3b:00.0/information`; any DRM driver, such as amdgpu, has its
//! `/dev/dri/` names in `/sys/bus/pci/devices/0000:03:00.0/drm/`.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Longest file about a GPU that is read, in bytes.
const MAX_INFORMATION: usize = 4096;

/// A PCI device, as `0000:3b:00.0`: domain, bus, device and function, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciAddress(String);

impl PciAddress {
    /// Reads `0000:3b:00.0`, or `0000:3b:00` as an Xid has it, which is function 0.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (slot, function) = text.split_once('.').unwrap_or((text, "0"));
        let parts: Vec<&str> = slot.split(':').collect();
        let [domain, bus, device] = parts[..] else { return None };
        let hex = |part: &str, digits| part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        let whole = hex(domain, 4) && hex(bus, 2) && hex(device, 2) && hex(function, 1);
        whole.then(|| Self(format!("{slot}.{function}").to_ascii_lowercase()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where the kernel describes processes and devices.
#[derive(Debug, Clone)]
pub struct Roots {
    /// `/proc`
    pub proc: PathBuf,
    /// `/sys`
    pub sys: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into() }
    }
}

impl Roots {
    /// The files by which processes open this GPU; `None` if the driver does not tell.
    #[must_use]
    pub fn device_files(&self, gpu: &PciAddress) -> Option<HashSet<PathBuf>> {
        self.nvidia(gpu).or_else(|| self.drm(gpu))
    }

    fn nvidia(&self, gpu: &PciAddress) -> Option<HashSet<PathBuf>> {
        let path = self.proc.join("driver/nvidia/gpus").join(&gpu.0).join("information");
        let text = fs::read(path).ok().filter(|text| text.len() <= MAX_INFORMATION)?;
        let text = String::from_utf8_lossy(&text);
        let minor: u32 = text.lines().find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse().ok())?;
        Some(HashSet::from([format!("/dev/nvidia{minor}").into()]))
    }

    fn drm(&self, gpu: &PciAddress) -> Option<HashSet<PathBuf>> {
        let nodes = fs::read_dir(self.sys.join("bus/pci/devices").join(&gpu.0).join("drm")).ok()?;
        let names = nodes.filter_map(|node| node.ok()?.file_name().into_string().ok());
        let files: HashSet<_> = names.map(|name| Path::new("/dev/dri").join(name)).collect();
        (!files.is_empty()).then_some(files)
    }

    /// Whether a process has one of these files open. False where it may not be looked into.
    #[must_use]
    pub fn holds(&self, tgid: u32, files: &HashSet<PathBuf>) -> bool {
        let descriptors = fs::read_dir(self.proc.join(tgid.to_string()).join("fd"));
        let mut open = descriptors.into_iter().flatten().filter_map(|one| fs::read_link(one.ok()?.path()).ok());
        open.any(|file| files.contains(&file))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// What a node with two NVIDIA GPUs and one of AMD shows, with three processes.
    fn recorded(folder: &Path) -> Roots {
        let roots = Roots { proc: folder.join("proc"), sys: folder.join("sys") };
        for (address, minor) in [("0000:3b:00.0", 0), ("0000:af:00.0", 1)] {
            let gpu = roots.proc.join("driver/nvidia/gpus").join(address);
            fs::create_dir_all(&gpu).unwrap();
            let information = format!(
                "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 219\nGPU UUID: \t GPU-5f0c1d2e-0000-0000-0000-000000000000\n\
                 Video BIOS: \t 96.00.74.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n\
                 Bus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
            );
            fs::write(gpu.join("information"), information).unwrap();
        }
        for node in ["card2", "renderD130"] {
            fs::create_dir_all(roots.sys.join("bus/pci/devices/0000:03:00.0/drm").join(node)).unwrap();
        }
        let open: [(u32, &[&str]); 3] = [
            (100, &["/dev/null", "socket:[4711]", "/dev/nvidiactl", "/dev/nvidia1"]),
            (200, &["/dev/nvidia10", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/renderD130"]),
            (300, &["/dev/nvidia0"]),
        ];
        for (tgid, files) in open {
            let descriptors = roots.proc.join(tgid.to_string()).join("fd");
            fs::create_dir_all(&descriptors).unwrap();
            for (number, file) in files.iter().enumerate() {
                symlink(file, descriptors.join(number.to_string())).unwrap();
            }
        }
        roots
    }

    #[test]
    fn a_gpu_is_held_by_those_that_have_its_device_file_open() {
        let folder = tempfile::tempdir().unwrap();
        let roots = recorded(folder.path());
        let holders = |address| {
            let files = roots.device_files(&PciAddress::parse(address).unwrap()).unwrap();
            [100, 200, 300, 400].into_iter().filter(|tgid| roots.holds(*tgid, &files)).collect::<Vec<_>>()
        };
        assert_eq!(holders("0000:3B:00"), [300], "/dev/nvidia10 is another one");
        assert_eq!(holders("0000:af:00"), [100]);
        assert_eq!(holders("0000:03:00.0"), [200]);
    }

    #[test]
    fn a_gpu_that_no_driver_tells_of_is_nobodys() {
        let folder = tempfile::tempdir().unwrap();
        let roots = recorded(folder.path());
        assert_eq!(roots.device_files(&PciAddress::parse("0000:65:00").unwrap()), None);
    }

    #[test]
    fn an_address_is_four_numbers_and_no_path() {
        assert_eq!(PciAddress::parse("0000:3B:00").unwrap().to_string(), "0000:3b:00.0");
        for wrong in ["", "3b:00.0", "0000:3b:00.0.0", "0000:3b:00.", "../../self", "0000:3b:0g", "0000:3b:00:00"] {
            assert_eq!(PciAddress::parse(wrong), None, "{wrong}");
        }
    }
}
