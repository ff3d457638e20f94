"""From a simulation to what runtimes load: exports, retargeting, verification, baked and packed weights, plans for engine builders."""
